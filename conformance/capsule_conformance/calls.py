"""Calls a routing function that somebody else wrote: finds it, the order of its axes, and its gradients.

All axes have different sizes, so the shape of an output tells the order of its axes. A reading is a layout for every
input: its axes' letters in order, with 1 for a singleton and PQ for a pose matrix in place of H.
"""
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import io
import itertools
import re
import sys
import time
import traceback
import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np

AXES = {"N": "samples", "I": "input capsules", "J": "output capsules", "D": "entries of an input capsule", "E":
        "entries of an output capsule", "H": "entries of a pose matrix"}
LIBRARY = str(Path(inspect.__file__).parent)                 # of Python
IMPORTED = frozenset(sys.modules)  # such as numpy, which must not be imported twice
SIZES = {"N": 3, "I": 7, "J": 5, "D": 4, "E": 6, "H": 16, "K": 5}

# what: title. inputs, outputs: name -> axes. votes: the input whose axes J and E or H belong to votes
Interface = namedtuple("Interface", "what inputs outputs votes count")
INTERFACES = {
    "dynamic": Interface("dynamic routing (Sabour et al. 2017, Procedure 1)", {"u_hat": "NIJE"}, {"v": "NJE"}, "u_hat",
                         "n_iters"),
    "layer": Interface("a layer with dynamic routing (Sabour et al. 2017, Eq. 2 and Procedure 1)",
                       {"u": "NID", "W": "IJED"}, {"v": "NJE"}, "W", "n_iters"),
    "em": Interface("EM routing (Hinton et al. 2018, Procedure 1)",
                    {"V": "NIJH", "a": "NI", "beta_u": "J", "beta_a": "J"}, {"mu": "NJH", "a": "NJ"}, "V", "lambdas"),
    "margin-loss": Interface("the margin loss (Sabour et al. 2017, Eq. 4)", {"lengths": "NK", "present": "NK"},
                        {"loss": "N"}, None, None),
    "spread-loss": Interface("the spread loss (Hinton et al. 2018, Eq. 3)", {"a": "NK", "present": "NK"}, {"loss": "N"},
                             None, "m"),
}

# names of parameters, for an input or a count
NAMES = {"u_hat": "u_?hat|votes?|predictions?", "n_iters": r"n|t|r|((n|num|max)_?)?(routing_?)?(iter\w*|routings?)",
         "u": "u|x|inputs?|capsules", "W": "w|weights?", "V": "v|votes?|poses?", "a": r"a|a_?in|acts?|activations?\w*",
         "beta_u": "b(eta)?_?[uv]", "beta_a": "b(eta)?_?a", "lambdas": r"lam\w*"}


class Unusable(ValueError):
    """The function cannot be checked; the message says why, and what to do."""


class WrongShape(ValueError):
    """An output has another shape than for other inputs."""


def given(function):
    """Return a function that returns a function of the user's, which cannot be imported anew."""
    def fresh():
        return function
    fresh.is_given = True
    if not callable(function) or inspect.isclass(function):
        raise Unusable(no_function(function, repr(function)))
    return fresh


def load(target):
    """Return a function that imports the user's module anew and returns the object: module:name or file.py:name."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise Unusable(f"{target}: write module:function, such as mymodule:route")
    path = None
    if place.endswith(".ipynb"):
        raise Unusable(f"{place} is a notebook. Write in one of its cells: from capsule_conformance import "
                       f"assert_conforms; assert_conforms({name}). Or export it: jupyter nbconvert --to script {place}")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise Unusable(f"{place}: no such file in {Path.cwd()}")
        place = path.stem
        sys.path.insert(0, str(path.parent))
    sys.path.append(str(Path.cwd()))
    folder = path.parent if path else Path.cwd()
    latest = []                    # the object, from the latest import that succeeded

    def module():
        if path is None and place in IMPORTED:
            return importlib.import_module(place)
        for other in [other for other, made in sys.modules.items() if other not in IMPORTED and other != "__main__"
                      and Path(getattr(made, "__file__", None) or "/").parent == folder]:
            del sys.modules[other]                             # what it imports from its own folder may keep something
        sys.modules.pop(place, None)
        if path is None:
            importlib.invalidate_caches()
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(place, path)
        made = sys.modules[place] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    def fresh():
        argv, sys.argv = sys.argv, [str(path or place)]        # a module may parse it
        try:
            with silenced():
                found = module()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if latest:                                         # it can be imported once only
                return latest[0]
            if isinstance(error, SystemExit):
                raise Unusable(f"{place} ends the program when it is imported. Put its commands below if __name__ == "
                               "\"__main__\":") from None
            if "relative import" in str(error) and "." not in place:
                raise Unusable(f"{place}.py belongs to a package. Run the check above the package's folder, and write: "
                               f"PACKAGE.{place}:{name}") from None
            if not isinstance(error, ModuleNotFoundError):
                raise Unusable(f"{place} cannot be imported: {last_line(error)}") from None
            if error.name == place.split(".")[0]:
                raise Unusable(f"no module named {place}. Run the check in the folder of {place}.py, or write the "
                               f"path: path/to/{place}.py:{name}") from None
            raise Unusable(f"{place} imports {error.name}, which is not installed here. Install it, or run the check "
                           "with the Python that has it.") from None
        finally:
            sys.argv = argv
        for part in name.split("."):
            if not hasattr(found, part):
                names = [n for n in vars(found) if not n.startswith("_") and callable(getattr(found, n))]
                names.sort(key=lambda known: -difflib.SequenceMatcher(None, known, part).ratio())      # similar first
                more = f" and {len(names) - 10} more" if len(names) > 10 else ""
                raise Unusable(f"{place} has no {part}. It has: "
                               f"{', '.join(names[:10]) or 'nothing that can be called'}{more}")
            found = getattr(found, part)
        if not callable(found) or inspect.isclass(found):
            raise Unusable(no_function(found, target))
        if "." in name and parameter_names(found)[:1] == ["self"]:
            raise Unusable(f"{target} is a method of a class. Write a function that makes an object and calls it")
        latest[:] = [found]
        return found
    return fresh


def no_function(found, name):
    """Return a message about a class, or something else that cannot be checked, and the recipe for it."""
    if not inspect.isclass(found):
        return f"{name} is not a function. Write a function that calls it"
    roots = {base.__module__.split(".")[0] for base in found.__mro__}
    framework, recipe = ("Keras", "A Keras layer") if roots & {"keras", "tensorflow", "tf_keras"} else (
        "PyTorch", "A PyTorch module with weights of its own") if "torch" in roots else ("", "")
    of_framework = f" of {framework}" if framework else ""
    return (f"{name} is a class{of_framework}. Write a function that calls it: "
            f"docs/reference/conformance.md, \"{recipe or 'Recipes'}\"")


def signature_of(function):
    """Return the signature of a function; of a PyTorch module, whose __call__ takes anything, that of its forward."""
    return inspect.signature(function if inspect.isroutine(function) else getattr(function, "forward", function))


def parameter_names(function):
    """Return the names of a function's positional parameters, or none if it does not say."""
    try:
        parameters = signature_of(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def is_target(name):
    """Return whether a parameter of a loss is the labels, by its name."""
    return name in ("t", "y", "gt") or any(
        word in name for word in ("true", "label", "target", "present", "onehot", "one_hot", "classes"))


def argument_order(function, interface, counted):
    """Return the inputs, and the count if there is one, in the order of the function's parameters by their names.

    Parameters of unknown names take what is left, in the usual order.
    """
    usual = [*interface.inputs, *([interface.count] if counted else [])]
    names = [name.lower() for name in parameter_names(function)][:len(usual)]
    known = [next((role for role in usual if re.fullmatch(NAMES[role], name)), None) for name in names]
    if len(known) < len(usual) or any(known.count(role) > 1 for role in usual):
        return usual
    left = iter([role for role in usual if role not in known])
    return [role or next(left) for role in known]


@contextlib.contextmanager
def silenced():
    """Keep what the user's code prints, and its warnings, out of the report."""
    with (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()),
          warnings.catch_warnings(), np.errstate(all="ignore")):
        warnings.simplefilter("ignore")
        yield


def last_line(error):
    """Return the user's line that raised an exception, its type and its message."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != Path(__file__).parent]
    own = [f for f in frames if not {"site-packages", "dist-packages"} & set(Path(f.filename).parts)
           and not f.filename.startswith((LIBRARY, "<"))] or frames
    where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own and not isinstance(
        error, SyntaxError) else ""                            # whose message names it
    return where + " ".join(re.sub("\x1b\\[[0-9;]*m", "", f"{type(error).__name__}: {error}").split())[:300]


def arrange(x, axes, layout):
    """Return x, whose axes are those letters, in a layout: a permutation, with 1 for a singleton and PQ for H = 4*4."""
    if "P" in layout:
        axes = axes.replace("H", "PQ")
        side = int(round(x.shape[-1] ** 0.5))
        x = x.reshape(*x.shape[:-1], side, side)
    x = x.transpose([axes.index(letter) for letter in layout if letter != "1"])
    return x.reshape([1 if letter == "1" else x.shape[layout.replace("1", "").index(letter)] for letter in layout])


def find_layout(shape, axes, sizes):
    """Return the layout of an output of that shape, or None if its axes are not those letters."""
    squeezed = [n for n in shape if n != 1]
    for letters in (axes, axes.replace("H", "PQ")):
        for order in itertools.permutations(letters):
            if "Q" in order and order.index("Q") != order.index("P") + 1:
                continue
            if squeezed == [sizes[letter] for letter in order]:
                rest = iter(order)
                return "".join("1" if n == 1 else next(rest) for n in shape)
    return None


def restore(y, axes, layout):
    """Return an output as an array of those axes; the inverse of arrange."""
    letters = layout.replace("1", "")
    y = y.reshape([n for n, letter in zip(y.shape, layout) if letter != "1"])
    wanted = axes.replace("H", "PQ") if "P" in letters else axes
    y = y.transpose([letters.index(letter) for letter in wanted])
    return y.reshape(*y.shape[:-2], -1) if "P" in letters else y


def layouts(axes, singleton):
    """Return the orders of some axes, the usual ones first; with one singleton in every place if asked for."""
    orders = ["".join(order) for order in itertools.permutations(axes)]
    orders.sort(key=lambda order: (order != axes, order[0] != axes[0], order[-1] != axes[-1], order))
    if not singleton:
        return orders
    split = [order.replace("H", "PQ") for order in orders if "H" in order]
    return split + [order[:k] + "1" + order[k:] for order in orders for k in range(len(order), -1, -1)]


def strided(x):
    """Return a view with the numbers of x, in an array with gaps whose axes are in the reverse order in memory."""
    reverse = range(x.ndim)[::-1]
    sizes = [2 * x.shape[axis] for axis in reverse]
    if isinstance(x, np.ndarray):
        view = np.zeros(sizes, x.dtype).T[(slice(None, None, 2),) * x.ndim]
        view[...] = x
        return view
    view = x.new_zeros(sizes).permute(*reverse)[(slice(None, None, 2),) * x.ndim]
    return view.copy_(x)


def arrays_of(result):
    """Return the arrays of numbers in what a function returned: itself, or those in its tuple, list or dict."""
    if hasattr(result, "shape"):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, tuple) and all(isinstance(x, (int, float)) for x in result):
        return [np.asarray(x) for x in result]                 # such as a loss and an accuracy
    inner = result
    while isinstance(inner, (tuple, list)) and inner:
        inner = inner[0]
    numbers = not hasattr(inner, "shape") and isinstance(result, (tuple, list)) and result
    if not isinstance(result, (tuple, list)) or numbers and isinstance(result[0], (int, float, list)):
        try:
            y = np.asarray(result)
        except (ValueError, TypeError, RuntimeError):          # lists of unequal lengths, of arrays, of tensors
            y = None
        if y is not None and y.dtype.kind in "fiu":
            return [y]
    return [x for part in result for x in arrays_of(part)] if isinstance(result, (tuple, list)) else []


def dtype_name(y):
    """Return the type of an array's numbers, such as float32, of any framework."""
    text = str(y.dtype if hasattr(y, "dtype") else np.asarray(y).dtype)
    known = re.search(r"[a-z]+\d+", text)                      # in TensorFlow's <dtype: 'float32'>, too
    return known[0] if known else text


def to_numpy(y):
    y = y.detach().cpu() if hasattr(y, "detach") else y
    if str(getattr(y, "dtype", "")).endswith("bfloat16"):
        y = y.float()
    return np.asarray(y)


class Call:
    """Calls the user's function with canonical arrays in one reading: a layout for every input."""

    def __init__(self, interface, fresh, framework, dtype, sizes, count):
        self.interface, self.fresh, self.framework, self.dtype, self.count = interface, fresh, framework, dtype, count
        self.sizes = sizes | {"P": round(sizes["H"] ** 0.5), "Q": round(sizes["H"] ** 0.5)}
        self.reading, self.found_dtype = None, dtype
        self.take, self.fitting = {}, {}                       # output -> which of the arrays that fit it, how many do
        self.deadline, self.stopped = None, False              # of the search for a reading; whether it was reached
        self.renew()
        self.order = self.find_order()

    def find_order(self):
        """Return the names of the arguments, in the order in which the function takes them."""
        return argument_order(self.function, self.interface, self.count is not None)

    def in_order(self, given, n):
        """Return the arguments for a call, in the order of the function's parameters."""
        given = given if self.count is None else given | {self.interface.count: self.count(n)}
        return [given[name] for name in self.order]

    def renew(self):
        """Import the user's module again, which resets whatever it keeps."""
        with self.precision():
            self.function = self.fresh()

    @contextlib.contextmanager
    def precision(self):
        """Make the checked dtype PyTorch's default, so that zeros() without a dtype has it."""
        if self.framework != "torch":
            yield
            return
        import torch
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(default)

    def tensor(self, x):
        if self.framework == "numpy":
            return np.array(x, self.dtype)
        import torch
        return torch.tensor(np.ascontiguousarray(x), dtype=getattr(torch, self.dtype))

    def arguments(self, inputs):
        """Return the tensors to pass, by the names of the inputs."""
        return {name: self.tensor(arrange(x, self.interface.inputs[name], self.reading[name]))
                for name, x in inputs.items()}

    def call(self, given, n):
        """Return the arrays that the function returns for these tensors and n iterations."""
        with silenced(), self.precision():
            try:
                result = self.function(*self.in_order(given, n))
            except SystemExit:
                raise RuntimeError("it called sys.exit()") from None
        if isinstance(result, dict) and result.keys() >= self.interface.outputs.keys():
            result = [result[name] for name in self.interface.outputs]
        arrays = arrays_of(result)
        if result is None:
            raise TypeError("your function returned None. End it with a return")
        if not arrays:
            raise TypeError(f"returned {type(result).__name__}, and no array")
        if self.framework == "torch" and not any(hasattr(y, "detach") for y in arrays):
            raise TypeError("returned no PyTorch tensor. Return the tensor itself, without .numpy() or .item(). If it "
                            "works on NumPy arrays, add --framework numpy")
        return arrays

    def match(self, results, sizes):
        """Return (place, layout) of every output, or None if no array that was returned has its shape."""
        found, free = {}, list(range(len(results)))
        for name, axes in self.interface.outputs.items():
            fitting = [(k, layout) for k in free if (layout := find_layout(np.shape(results[k]), axes, sizes))]
            if not fitting:
                return None
            place = self.take.get(name, -1)
            found[name] = fitting[place if place < len(fitting) else -1]
            self.fitting[name] = max(len(fitting), self.fitting.get(name, 0))
            free.remove(found[name][0])
        return found

    def outputs(self, results, sizes):
        """Return the outputs in canonical order, and their layouts. ValueError if the shapes do not fit."""
        found = self.match(results, sizes)
        if found is None:
            raise ValueError("returned " + " and ".join(str(tuple(np.shape(y))) for y in results))
        self.found_dtype = dtype_name(results[next(iter(found.values()))[0]])
        if "float" not in self.found_dtype:
            raise TypeError(f"returned numbers of type {self.found_dtype}")
        return [restore(to_numpy(results[k]).astype(float), self.interface.outputs[name], layout)
                for name, (k, layout) in found.items()], {name: layout for name, (_, layout) in found.items()}

    def sizes_of(self, inputs):
        return self.sizes | {letter: size for name, x in inputs.items()
                             for letter, size in zip(self.interface.inputs[name], x.shape)}

    def __call__(self, inputs, n):
        return self.outputs(self.call(self.arguments(inputs), n), self.sizes_of(inputs))[0]

    def frame(self, inputs, n):
        """Return where every output is among the results, as an index from the end or the first, and its layout."""
        results = self.call(self.arguments(inputs), n)
        found = self.match(results, self.sizes)
        return {name: (k if self.take.get(name) == 0 else k - len(results), layout)
                for name, (k, layout) in found.items()}

    def in_frame(self, inputs, n, frame, sizes, strided=False):
        """Return the outputs for inputs of any sizes, two of which may be equal; WrongShape if one does not fit."""
        given = self.arguments(inputs)
        if strided:
            given = {name: globals()["strided"](x) for name, x in given.items()}
        results = self.call(given, n)
        return [self.take_out(results, k, name, layout, sizes) for name, (k, layout) in frame.items()]

    def take_out(self, results, k, name, layout, sizes):
        """Return one output in canonical order."""
        wanted = tuple(1 if letter == "1" else sizes[letter] for letter in layout)
        shape = tuple(np.shape(results[k])) if -len(results) <= k < len(results) else ()
        if shape != wanted:
            raise WrongShape(f"returned the shape {shape} in place of {wanted}")
        y = to_numpy(results[k]).astype(float)
        y = y[tuple(0 if letter == "1" else slice(None) for letter in layout)]
        return restore(y, self.interface.outputs[name], layout.replace("1", ""))

    def weigh(self, results, weights):
        """Return sum(outputs * weights) as a tensor."""
        found = self.match(results, self.sizes)
        arranged = [self.tensor(arrange(w, self.interface.outputs[name], layout))
                    for (name, (_, layout)), w in zip(found.items(), weights)]
        return sum((results[k] * w.to(results[k].device)).sum() for (k, _), w in zip(found.values(), arranged))

    def gradients(self, inputs, n, weights, names):
        """Return the gradients of sum(outputs * weights) by torch's autograd: name -> array, None if not reached."""
        import torch
        def forward():
            given = self.arguments(inputs)
            for name in names:
                given[name].requires_grad_(True)
            copies = {name: x.clone() for name, x in given.items()}     # may be changed in place, as a network's votes
            return self.weigh(self.call(copies, n), weights), [given[name] for name in names]

        total, given = forward()
        if not total.requires_grad:
            return dict.fromkeys(names)
        with silenced(), self.precision():                     # a backward pass of the user's may make tensors, too
            try:
                grads = torch.autograd.grad(total, given, allow_unused=True)
            except RuntimeError as error:
                if "checkpoint" not in str(error).lower():
                    raise
                total, given = forward()                       # torch.utils.checkpoint, reentrant: only so
                total.backward()
                grads = [x.grad for x in given]
        return {name: None if g is None else self.canonical(g, name) for name, g in zip(names, grads)}

    def converts_tensors(self, inputs, n):
        """Return whether the function makes NumPy arrays of PyTorch tensors, so that it is to be given arrays."""
        given = self.arguments(inputs)
        for x in given.values():
            x.requires_grad_(x.is_floating_point())
        try:
            self.call(given, n)
        except Exception as error:
            return "call numpy() on Tensor" in str(error)
        return False

    def canonical(self, x, name):
        """Return an array in the layout of an input, such as its gradient, with its axes in canonical order."""
        return restore(to_numpy(x).astype(float), self.interface.inputs[name], self.reading[name])

    def readings(self, fixed):
        """Yield readings in stages, the usual ones first; fixed: layouts that the user gave, by name."""
        given = len(fixed) == len([axes for axes in self.interface.inputs.values() if len(axes) > 1])
        for singleton in (False,) if given else (False, True):
            options = []
            for name, axes in self.interface.inputs.items():
                if name in fixed:
                    options.append([fixed[name]])
                elif len(axes) == 1:
                    options.append([axes])
                else:
                    options.append(layouts(axes, False) + (layouts(axes, True) if singleton else []))
            every = [dict(zip(self.interface.inputs, chosen)) for chosen in itertools.product(*options)]
            yield [reading for reading in every if not singleton or any(
                {"1", "P"} & set(layout) for name, layout in reading.items() if name not in fixed)]

    def by_inputs(self, stages):
        """Yield the readings of every stage in two: those with usual orders of all inputs, and the others."""
        for stage in stages:
            usual = [reading for reading in stage if all(
                self.is_usual(layout, self.interface.inputs[name]) for name, layout in reading.items())]
            yield usual
            yield [reading for reading in stage if reading not in usual]

    @staticmethod
    def is_usual(layout, axes):
        order = layout.replace("1", "").replace("PQ", "H")
        return order[0] == axes[0] and order[-1] == axes[-1]

    def penalty(self, found):
        """Return a key that sorts readings by their outputs' layouts: samples first, entries last, no singletons."""
        usual = [layout.replace("1", "").replace("PQ", "H") for layout in found.values()]
        return [(layout[0] != axes[0], layout[-1] != axes[-1])
                for layout, axes in zip(usual, self.interface.outputs.values())]

    def search(self, inputs, n, fixed):
        """Yield the readings whose outputs have the right shape, as (reading, output layouts), the usual ones first.

        Usual inputs, with samples first and entries last, come before others, and then usual outputs. A reading with
        both is yielded at once, so that a slow function is called no more than needed. Nothing more is tried after
        self.deadline. Raise Unusable if there is none.
        """
        errors, unusual, found_any = [], [], False
        for stage in self.by_inputs(self.readings(fixed)):
            for reading in stage:
                if self.deadline is not None and time.monotonic() > self.deadline:
                    self.stopped = True
                    return
                self.reading = reading
                try:
                    found = self.outputs(self.call(self.arguments(inputs), n), self.sizes_of(inputs))[1]
                except Exception as error:
                    if not errors or furthest(error) > furthest(errors[0][1]):
                        errors = [(reading, error)]
                    continue
                if any(map(any, self.penalty(found))):
                    unusual.append((self.penalty(found), reading, found))
                else:
                    found_any = True
                    yield reading, found
            for _, reading, found in sorted(unusual, key=lambda fit: fit[0]):
                found_any = True
                yield reading, found
            unusual = []
        if found_any:
            return
        if not errors:
            scores = next(iter(self.interface.inputs))
            shape = "lengths=NK or lengths=NKE" if scores == "lengths" else f"{scores}=NK"
            raise Unusable(f"--axes: no such reading. Write order={scores},present or order=present,{scores}; "
                           f"{shape}; present=NK or present=N")
        reading, error = errors[0]
        shapes = ", ".join(f"{name} {shape_text(layout, self.sizes)}" for name, layout in reading.items()
                           if name in self.interface.inputs and "K" not in layout)
        hint = ""
        if self.interface.count == "lambdas" and "'list'" in str(error):
            hint = " To check a function that takes a number of iterations, add its own --lambdas."
        if "present" in self.interface.inputs and furthest(error) < 1:
            hint += " If your loss has a fixed number of classes, give it, such as: --sizes K=10."
        such = f", such as {shapes}" if shapes else ""
        where = f" No order of the axes gives {outputs_text(self.interface, self.sizes)}{such}. It is" if furthest(
            error) < 2 else " It is"
        raise Unusable(f"{last_line(error).rstrip('.')}.{hint}{where} called with ({', '.join(self.order)}); \"What "
                       "may differ\" in docs/reference/conformance.md shows how to check other functions")


def furthest(error):
    """Return 2 for an error that no order of the axes causes, 1 for an output of another shape, -1 for an index that
    does not fit, which says less about sizes than other errors, else 0."""
    own = (NameError, AttributeError, KeyError, TypeError, ImportError, ZeroDivisionError, NotImplementedError)
    if isinstance(error, own):
        return 2
    return int(isinstance(error, ValueError) and str(error).startswith("returned ")) - isinstance(error, IndexError)


class LossCall(Call):
    """Calls a loss: lengths or capsules (or activations), labels as 0 and 1 or as numbers, in either order."""

    @property
    def scores(self):
        return next(iter(self.interface.inputs))

    def find_order(self):
        return [*self.interface.inputs, *([] if self.count is None else [self.interface.count])]

    def in_order(self, given, n):                              # whose order is a part of the reading
        return [*given.values(), *([] if self.count is None else [self.count(n)])]

    def arguments(self, inputs):
        given = {}
        for name in self.reading["order"].split(","):
            if name == "present":
                x = self.tensor(inputs[name])
                if self.reading["present"] == "N":
                    x = self.tensor(inputs[name].argmax(1))
                    x = x.astype(int) if self.framework == "numpy" else x.long()
            else:
                x = inputs[name]
                if self.reading[self.scores] == "NKE":         # capsules with these lengths
                    x = x[..., None] * np.full(self.sizes["E"], self.sizes["E"] ** -0.5)
                x = self.tensor(x)
            given[name] = x
        return given

    def canonical(self, x, name):
        """Return the gradient with respect to the lengths: of capsules, along the capsules."""
        x = to_numpy(x).astype(float)
        return x.sum(-1) * self.sizes["E"] ** -0.5 if self.reading[self.scores] == "NKE" else x

    def match(self, results, sizes):
        wanted = {(): "", (sizes["N"],): "N", (sizes["N"], sizes["K"]): "NK"}    # NK: a loss of each class
        for k, y in enumerate(results):
            squeezed = tuple(n for n in np.shape(y) if n != 1)
            if squeezed in wanted:
                return {"loss": (k, wanted[squeezed])}
        return None

    def outputs(self, results, sizes):
        found = self.match(results, sizes)
        if found is None:
            raise ValueError("returned " + " and ".join(str(tuple(np.shape(y))) for y in results))
        k, layout = found["loss"]
        self.found_dtype = dtype_name(results[k])
        y = to_numpy(results[k]).astype(float).reshape([sizes[letter] for letter in layout])
        return [y.sum(1) if layout == "NK" else y], {"loss": layout}

    def take_out(self, results, k, name, layout, sizes):
        y = to_numpy(results[k]).astype(float)
        if y.size != np.prod([sizes[letter] for letter in layout]):
            raise WrongShape(f"returned the shape {tuple(y.shape)} in place of "
                             f"{tuple(sizes[letter] for letter in layout)}")
        y = y.reshape([sizes[letter] for letter in layout])
        return y.sum(1) if layout == "NK" else y

    def weigh(self, results, weights):
        k, layout = self.match(results, self.sizes)["loss"]
        y = results[k].reshape(-1)
        if layout == "":
            return y.sum()
        return (y.reshape(self.sizes["N"], -1).sum(1) * self.tensor(weights[0]).to(y.device)).sum()

    def readings(self, fixed):
        names = [name.lower() for name in parameter_names(self.function)]
        swapped = len(names) > 1 and is_target(names[0]) and not is_target(names[1]) and "pred" not in names[0]
        orders = [f"{self.scores},present", f"present,{self.scores}"]
        every = [{"order": order, self.scores: layout, "present": present}
                 for order in (reversed(orders) if swapped else orders)
                 for layout in (("NK", "NKE") if self.scores == "lengths" else ("NK",)) for present in ("NK", "N")]
        yield [reading for reading in every if reading | fixed == reading]

    def by_inputs(self, stages):
        return stages

    def penalty(self, found):
        return []


def shape_text(layout, sizes):
    """Return a layout with its sizes, such as (N, J, 1, E) = (3, 5, 1, 6)."""
    names = ", ".join(str(sizes[letter]) if letter in "PQ" else letter for letter in layout)
    numbers = ", ".join("1" if letter == "1" else str(sizes[letter]) for letter in layout)
    comma = "," if len(layout) == 1 else ""
    return f"({names}{comma}) = ({numbers}{comma})"


def outputs_text(interface, sizes):
    if "loss" in interface.outputs:
        return "one loss, or one per sample"
    return " and ".join(f"an output {name} {shape_text(axes, sizes)}" for name, axes in interface.outputs.items())

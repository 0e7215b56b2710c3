"""The networks that a program draws, probes or serves: trained here by an experiment, or loaded from files."""
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from .messages import InputError, Parser, flag_name


@dataclass(frozen=True)
class Network:
    """A trained network and its data."""
    name: str
    config: object                 # settings of the evaluation
    trained: object                # settings of the training
    params: dict                   # weights, with the running statistics
    history: dict                  # of its training
    data: dict                     # of load_data
    loaded: object = None          # what load_network returned, if the network was not trained here

    @property
    def label(self):
        """Return the words for a title: model, preset and seed"""
        return f"{self.trained.model}, preset {self.trained.preset}, seed {self.trained.seed}"

    @property
    def test_flags(self):
        """Return the flags of the settings, other than of the data, that only the evaluation has"""
        return [f"{flag_name(f.name)} {getattr(self.config, f.name)}" for f in dataclasses.fields(self.config)
                if "test" in f.metadata and "runtime" not in f.metadata and f.name not in ("digits", "data")
                and getattr(self.config, f.name) != getattr(self.trained, f.name)]

    @property
    def training_flags(self):
        """Return the flags of its training that are not the defaults of its model and preset"""
        unsaid = ["seed", "digits"]
        if "slimmed" in self.history:
            unsaid.append("recon_weight")         # 0 in such a file, which has no decoder any more
        return training_flags(self.trained, unsaid)


def training_flags(config, unsaid=("seed", "digits"), given=("model", "preset")):
    """Return the flags of a training that are not the defaults beside `given`, settings that are said
    elsewhere. unsaid: other settings that are left out"""
    usual = type(config)(**{name: getattr(config, name) for name in given})
    flags = []
    for f in dataclasses.fields(config):
        is_setting = "help" in f.metadata and "runtime" not in f.metadata
        value = getattr(config, f.name)
        if is_setting and f.name not in unsaid and value != getattr(usual, f.name):
            flags.append(f"{flag_name(f.name)} {value}")
    return flags


def add_flags(parser, module, text):
    """Add --load, whose help begins with `text`, and a flag for every setting of an experiment"""
    parser.add_argument("--load", nargs="*", action="extend", metavar="PLACE",
                        help=f"{text} in PLACE, a file or a run's folder; if it is omitted, the pretrained "
                        f"{', '.join(path.name for path in module.PRETRAINED)} in weights/")
    module.add_settings(parser)


def load_network(module, path):
    """Return a trained network of a file: config, weights (with the running statistics), history, source of its
    training data, step, and file, which identifies it in results"""
    config, state = module.load(path)
    return SimpleNamespace(config=config, weights=module.weights_of(state), history=state["history"],
                           step=state["step"], source=state["history"]["source"],
                           file=module.identity_of(path, config))


def measuring_parser(module, description):
    """Return the Parser of a program that measures one trained network of an experiment: --load,
    --out-json, and the experiment's own flags"""
    parser = Parser(description=description)
    parser.add_argument("--load", required=True, metavar="PLACE",
                        help="the network: a weights file or a run's folder")
    parser.add_argument("--out-json", metavar="FILE",
                        help="write settings and results to this file; -: print")
    module.add_settings(parser)
    return parser


def load_for_evaluation(module, path, args):
    """Return load_network's result and the Config to evaluate it with: its own, with the flags in args, and with the
    data of its training unless these flags name others. Raise InputError for a flag that contradicts its training"""
    network, given = load_network(module, path), module.given_settings(args)
    if "model" in given:
        given["model"] = " ".join(given["model"])
    if network.source in getattr(module, "DIGIT_NAMES", ()):
        given = {"digits": network.source} | given
    elif hasattr(network.config, "data_dir") and not (given.get("data_dir") or "digits" in given):
        raise InputError(f"{path}: was trained on {module.data_name(network.source)}. Give their folder, or that of "
                         "others to test on, as --data-dir")
    module.check_same(path, network.config, given, ("runtime", "test"))
    config = dataclasses.replace(network.config, **given)
    if any(network.weights[name].shape != shape for name, shape in module.param_shapes(config).items()):
        raise InputError(f"{path}: was trained on {module.data_name(network.source)}, of another size. Give such data")
    return network, config


def chosen(module, args):
    """Return the networks to train or, with --load, to draw: [(name, load_network's result or None, Config)]. Names
    are the models or, of loaded networks, the files' names"""
    if args.load is None:
        return [(config.model, None, config) for config in module.configs_of(module.given_settings(args))]
    paths = [module.weights_file(path) for path in args.load or module.PRETRAINED]
    if len(set(map(Path.resolve, paths))) < len(paths):
        raise InputError("--load: a file is given twice. Give each file once")
    names = [path.resolve().parent.name if path.name == "weights.npz" else path.stem for path in paths]
    loaded = [load_for_evaluation(module, path, args) for path in paths]
    return [(name, *pair) for name, pair in zip(names, loaded)]


def names_of(runs):
    """Return short distinct names of some of chosen(): models, else files, else these with numbers"""
    for names in ([config.model for *_, config in runs], [name for name, *_ in runs]):
        if len(set(names)) == len(names):
            return names
    return [f"{name}-{k}" for k, (name, *_) in enumerate(runs, 1)]


def train(module, config, data, each_step=None, each_epoch=None):
    """Train a network, with the lines of progress of its script and, beside them, other hooks. Return its state"""
    progress = module.Progress(config, data)

    def after_step(state, terms):
        progress.step(state, terms)
        if each_step is not None:
            each_step(state, terms)

    def after_epoch(state):
        progress.epoch(state)
        if each_epoch is not None:
            each_epoch(state)

    try:
        return module.train(config, data, None, after_step, after_epoch)
    finally:
        progress.clear()


def make(module, name, network, config, data, kind=Network, **hooks):
    """Return the Network of one of chosen(), trained here if it was not loaded. hooks: each_step and each_epoch"""
    if getattr(config, "recompute_statistics", 0):
        raise InputError(f"--recompute-statistics: give it to {module.EXPERIMENT}.py with --outdir NEW; load NEW")
    fitted = module.fit_to_data(config, data)
    if network is None:
        state = train(module, fitted, data, **hooks)
        return kind(name, fitted, fitted, module.weights_of(state), state["history"], data)
    if fitted != config and fitted.n_classes == config.n_classes:
        raise InputError(f"{name}: was trained on images of {module.size_in_words(config)}, and these have "
                         f"{module.size_in_words(fitted)}. Give its own data as --data-dir")
    if fitted != config:
        raise InputError(f"{name}: was trained on {config.n_classes} classes, and these data have {fitted.n_classes}. "
                         "Give its own data as --data-dir")
    theirs, ours = module.class_names(network.history), module.class_names(data)
    if theirs and ours and theirs != ours:
        raise InputError(f"{name}: was trained on other classes: {', '.join(theirs):.60}. These data have "
                         f"{', '.join(ours):.60}. Give its own data as --data-dir")
    return kind(name, config, network.config, network.weights, network.history, data, network)

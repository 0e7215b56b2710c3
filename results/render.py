#!/usr/bin/env python3
"""Render numbers and tables into README.md and docs/ from the results, and write the results logs
(results/EXPERIMENT/README.md).

    python3 results/render.py              rewrite the documents in place
    python3 results/render.py --check      report where a document and the results disagree; exit code 1 if one does
    python3 results/render.py --pictures   draw README's figures, viz/findings/, from the results

A number in a document is enclosed by `<!-- value: EXPERIMENT SETTING, KEY -->` and `<!-- end -->`, for example
`affnist backbone/capsnet-shared minus backbone/cnn-gap, affine_accuracy, points`. EXPERIMENT is multimnist, smallnorb
or affnist, SETTING is TABLE/SETTING of workflow/runs.py, KEY is a key of a result, with dots into nested ones. The
number is the mean over seeds +- its 95% t interval; for one seed the interval follows from the test images. With
`minus` it is the mean difference, paired by seed. KEY vs KEY takes another key of the second setting. KEY once GOAL
takes the first setting's KEY at the first evaluation during training at which its GOAL was as good as the second's at
the end, for the seeds that reached it; with `when` in place of `once`, where it was exactly as good for the first time,
interpolated between two evaluations. TABLE+TABLE/SETTING are several draws of the data: the interval is over the
draws' means. Options after the key: plain (the mean alone), N digits, percent, points (hundredths), range (minimum
and maximum of the seeds), seeds (their number).

`<!-- claim: CLAIM MEASURE, STYLE -->` is a measure of a claim of workflow/claims.py by its name
there, with all seeds. `words` gives a difference as "4.3 percentage points (95% CI 1.5 to 7.1, n =
5)", `reversed` with the other sign. `<!-- verdict: CLAIM -->` is the claim's verdict by the rule of
workflow/rule.py, which takes planned seeds alone, `<!-- reason: CLAIM -->` its reason, `<!-- count:
CLAIM -->` how many tests are for it, against it, find none, or are open. `<!-- table: claim CLAIM
-->` is the table of its tests, `<!-- table: others CLAIM -->` that of its other measures, and
`<!-- table: claims -->` README's figure and table of all claims. README has no other marks:
tests/test_core_readme.py says where the numbers of its prose come from, and checks them.

A table's mark holds a line `columns: HEADING = KEY | HEADING = KEY minus first, STYLE | ...` and one line per row,
`LABEL = SETTING`. workflow/result_files.py says what a result is and when it is stale.
"""
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow")]

from lab.files import write_atomically
from lab.messages import InputError, Parser, run_cli
from lab.statistics import crossed_interval, mean_and_interval

import claims
import history
import rule
import runs
import toy_hits
from result_files import BY_NAME, read, stale

SHORT = {name.split("_")[0]: name for name in runs.EXPERIMENTS}
PLANNED = {}                       # (experiment, "table/setting") -> its runs
for _result in BY_NAME.values():
    PLANNED.setdefault((_result.experiment, f"{_result.table}/{_result.setting}"), []).append(_result)


# -------------------------------------------------------------- reading results

class Results:
    """The results of a folder: for an experiment and a setting, "table/setting", a line per seed. lines: these, {name
    of a result: its line}, instead of the folder's"""

    def __init__(self, folder, lines=None):
        try:
            lines = read(folder) if lines is None else lines
        except ValueError as error:
            raise InputError(str(error)) from None
        self.folder, self.results, self.stale = folder, {}, set()
        for name, line in lines.items():
            experiment, table, _ = name.split("/")
            key = experiment, f"{table}/{line['setting']}"
            self.results.setdefault(key, {})[line["seed"]] = line
            self.stale |= {key} if stale(name, lines) else set()

    def runs(self, experiment, setting):
        """Return the results of a setting by seed; {} if there are none"""
        return self.results.get((experiment, setting), {})

    def values(self, experiment, setting, key):
        """Return {seed: number} of a key; runs with --stop-at count only if they reached that accuracy"""
        if (experiment, setting) not in PLANNED:
            raise InputError(f"{experiment} {setting}: workflow/runs.py has no such table and setting")
        return {seed: number(run, key) for seed, run in self.runs(experiment, setting).items() if reached(run)}

    def samples(self, experiment, one, other, key):
        """Return the numbers whose mean is asked for: one per seed or, for several draws, the mean over seeds of each
        draw"""
        tables, _, setting = one.partition("/")
        draws = tables.split("+")
        others = other.partition("/")[0].split("+") if other else draws
        if len(draws) != len(others):
            raise InputError(f"{one} minus {other}: must have as many tables on either side")
        if len(draws) > 1:
            found = [self.samples(experiment, f"{a}/{setting}", other and f"{b}/{other.partition('/')[2]}", key)
                     for a, b in zip(draws, others)]
            return [sum(part) / len(part) for part in found] if all(found) else []
        return list(self.by_seed(experiment, one, other, key).values())

    def by_seed(self, experiment, one, other, key):
        """Return {seed: number} of what is asked for of one draw of the data"""
        at = when if " when " in key else once
        key, _, goal = key.replace(" when ", " once ").partition(" once ")
        first, _, second = key.partition(" vs ")
        values = self.values(experiment, one, first)
        if goal:
            ends = self.values(experiment, other, goal)
            values = {seed: at(self.runs(experiment, one)[seed]["history"], first, goal, ends[seed])
                      for seed in values.keys() & ends.keys()}
        if other:
            minus = self.values(experiment, other, second or first)
            values = {seed: values[seed] - minus[seed] for seed in sorted(values.keys() & minus.keys())
                      if None not in (values[seed], minus[seed])}
        return {seed: value for seed, value in values.items() if value is not None}

    def stopped_at(self, experiment, one, other, key):
        """Return {seed: index of the evaluation at which KEY once GOAL stops the first setting, None
        if it never does}; {} of another key"""
        _, _, goal = key.partition(" once ")
        if not goal:
            return {}
        ends = self.values(experiment, other, goal)
        return {seed: first_enough(run["history"][goal], ends[seed])
                for seed, run in self.runs(experiment, one).items() if seed in ends}

    def images_interval(self, experiment, setting, key):
        """Return the 95% interval from the test images if a setting has one result that holds it, else None"""
        found = list(self.runs(experiment, setting).values())
        return lookup(found[0], f"{key}_ci95") if len(found) == 1 else None


def reached(run):
    """Return whether a run with --stop-at reached that accuracy on validation samples; True for other runs"""
    goal = run.get("config", {}).get("stop_at")
    return not goal or max(run["history"]["val_accuracy"]) >= goal


def once(history, key, goal, enough):
    """Return a key at the first evaluation of a history at which another key was good enough; None if it never was"""
    k = first_enough(history[goal], enough)
    return None if k is None else history[key][k]


def first_enough(goals, enough):
    """Return the index of the first number that is good enough; None if there is none"""
    return next((k for k, reached in enumerate(goals) if reached >= enough), None)


def when(history, key, goal, enough):
    """Return a key where another key was just good enough for the first time, interpolated linearly between evaluations
    of a history; None if it never was"""
    values, goals = history[key], history[goal]
    k = next((k for k, reached in enumerate(goals) if reached >= enough), None)
    if not k:
        return values[k] if k == 0 else None
    share = (enough - goals[k - 1]) / (goals[k] - goals[k - 1])
    return values[k - 1] + share * (values[k] - values[k - 1])


def number(run, key):
    """Return a result's value of a key, with dots into nested values"""
    value = run
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def lookup(run, key):
    """Return a result's value of a key, or None"""
    try:
        return number(run, key)
    except (KeyError, IndexError, TypeError, ValueError):              # ValueError: a name where a list has a place
        return None


# -------------------------------------------------------------- numbers

STYLES = {"percent": (100, 1, "%"), "points": (100, 1, "")}             # factor, digits, unit


def drawn(results, experiment, one, other, key, styles=()):
    """Return one number as text; "not run" if there is no result, "none" if the results lack it"""
    values = results.samples(experiment, one, other, key)
    if "seeds" in styles:
        return str(len(values))
    if not values:
        return "none" if results.runs(experiment, one) and not other else "not run"
    if "words" in styles:
        return in_words(values, styles)
    images = None if other else results.images_interval(experiment, one, key)
    return number_text(values, styles, bool(other), images)


def rounded(number, digits, signed=False):
    """Return a number as text with some decimals, signed: with + before a positive one; what rounds to 0 has no sign"""
    text = f"{number:{'+' if signed else ''}.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def in_words(values, styles):
    """Return the mean of some differences with its 95% CI and n, as a sentence has it"""
    sign = -1 if "reversed" in styles else 1
    mean, half = (100 * part for part in mean_and_interval(values))
    text = f"{rounded(sign * mean, 1)} percentage points"
    if not math.isfinite(half):
        return f"{text} (n = 1)"
    low, high = rounded(sign * mean - half, 1), rounded(sign * mean + half, 1)
    return f"{text} (95% CI {low} to {high}, n = {len(values)})"


def number_text(values, styles=(), signed=False, images=None):
    """Return the mean of some numbers +- their 95% t interval as text. images: the interval of one number from the test
    images; its mean is then followed by it"""
    values = [-number for number in values] if "reversed" in styles else values
    factor, digits, unit = next((STYLES[style] for style in styles if style in STYLES), (1, 3, ""))
    digits = next((int(style.split()[0]) for style in styles if style.endswith(" digits")), digits)
    if "range" in styles:
        return " to ".join(dict.fromkeys(f"{factor * end:.{digits}f}{unit}" for end in (min(values), max(values))))
    mean, half = (factor * part for part in mean_and_interval(values))
    if "plain" in styles:
        return f"{mean:,.0f}" if abs(mean) >= 100 else f"{mean:.{digits}f}{unit}"
    text = rounded(mean, digits, signed)
    if images:
        text += f" ({factor * images[0]:.{digits}f}-{factor * images[1]:.{digits}f})"
    return text + (f" +- {half:.{digits}f}" if math.isfinite(half) else "") + unit


def styles_of(words):
    for word in words:
        known = (*STYLES, "plain", "range", "seeds", "words", "reversed")
        if word not in known and not re.fullmatch(r"\d digits", word):
            raise InputError(f"{word!r} is no style; give plain, N digits, percent, points, range, seeds, words "
                             "or reversed")
    return words


def parts_of(text, mark):
    """Return the stripped parts of a text between a mark"""
    return [part.strip() for part in text.split(mark)]


def value(results, text):
    """Return the number that a mark asks for, as text"""
    return drawn(results, *asked(text))


def asked(text):
    """Parse EXPERIMENT SETTING[ minus SETTING], KEY[, STYLE, ...]. Return experiment, setting, other setting, key,
    styles"""
    what, *rest = parts_of(text, ",")
    short, _, pair = what.partition(" ")
    if short not in SHORT or not rest:
        raise InputError(f"must be EXPERIMENT SETTING, KEY, the first of {', '.join(SHORT)}")
    one, _, other = pair.partition(" minus ")
    return SHORT[short], one, other, rest[0], styles_of(rest[1:])


# -------------------------------------------------------------- claims

def measure(text):
    """Parse CLAIM MEASURE[, STYLE, ...]: a measure of a claim by its name. Return experiment,
    setting, other setting, key, styles"""
    what, *styles = parts_of(text, ",")
    name, _, measure_name = what.partition(" ")
    if name not in claims.BY_NAME:
        raise InputError(f"no claim {name!r}. Give one of {', '.join(claims.BY_NAME)}")
    marks = claims.marks(claims.BY_NAME[name])
    if measure_name not in marks:
        raise InputError(f"{name} has no measure {measure_name!r}. Give one of {', '.join(marks)}")
    experiment, one, other, key, own = asked(marks[measure_name])
    return experiment, one, other, key, styles_of(styles) or own


def claim(results, text):
    """Return the number of a claim that a mark asks for, as text"""
    return drawn(results, *measure(text))


def planned_values(results, test):
    """Return what a test measured with its planned seeds, {seed: number}; of several draws of the
    data {draw: mean of its planned seeds}. And how many were planned"""
    experiment, one, other, key, styles = asked(test.mark)
    short = test.mark.split()[0]
    seeds = set(history.of(short, one).seeds)
    if other:
        seeds &= set(history.of(short, other).seeds)
    sign = -1 if "reversed" in styles else 1
    tables, _, setting = one.partition("/")
    if "+" not in tables:
        found = results.by_seed(experiment, one, other, key)
        return {seed: sign * found[seed] for seed in sorted(seeds & found.keys())}, len(seeds)
    found, others = {}, other.partition("/")[0].split("+")
    for table, other_table in zip(tables.split("+"), others):
        values = results.by_seed(experiment, f"{table}/{setting}",
                                 f"{other_table}/{other.partition('/')[2]}", key)
        values = [sign * values[seed] for seed in sorted(seeds & values.keys())]
        if values:
            found[table] = sum(values) / len(values)
    return found, len(others)


def toy_values(results, test, seeds):
    """Return the differences of a test on toys, (seeds, toys), and the toys' classes; None if the
    results do not hold hits per toy"""
    experiment, one, other, key, styles = asked(test.mark)
    stopped = results.stopped_at(experiment, one, other, key)
    name = key.partition(" once ")[0]
    rows, classes = [], None
    for seed in seeds:
        first = toy_hits.accuracies(results.runs(experiment, one)[seed], name, stopped.get(seed))
        second = toy_hits.accuracies(results.runs(experiment, other)[seed], name)
        if first is None or second is None:
            return None
        classes = first[1]
        rows.append((first[0] - second[0]) * (-1 if "reversed" in styles else 1))
    return rows, classes


def has_toys(test):
    """Return whether a test is on one set of 25 test toys"""
    short, setting = test.mark.split()[:2]
    return short == "smallnorb" and not setting.startswith(("shapes/", "gap-shapes/")) and "+" not in setting


def measured(results, test):
    """Return the rule.Measured of a test, in the unit of the paper's number"""
    short = test.mark.split()[0]
    _, one, other, _, styles = asked(test.mark)
    factor = next(STYLES[style][0] for style in styles if style in STYLES)
    tried = [history.of(short, setting).tried for setting in (one, other) if setting]
    tried = tuple(tried[::-1] if "reversed" in styles else tried)
    found, n_planned = planned_values(results, test)
    values, lacks = [factor * value for value in found.values()], ""
    if not values:
        return rule.Measured(n_planned, 0, math.nan, math.nan, math.nan, tried)
    mean, half = mean_and_interval(values)
    if has_toys(test) and len(values) > 1:
        by_toy = toy_values(results, test, found)
        if by_toy is None:
            half, lacks = math.nan, "the hits of each toy, at the epoch where a network is stopped, were not kept"
        else:
            mean, half = (factor * part for part in crossed_interval(*by_toy))
    return rule.Measured(n_planned, len(values), mean, mean - half, mean + half, tried, lacks)


def test_number(results, test):
    """Return the number of a test, of its planned seeds, with its interval, as text"""
    found, own = measured(results, test), asked(test.mark)[4]
    unit = "%" if "percent" in own else ""
    digits = next((int(style.split()[0]) for style in own if style.endswith(" digits")), 1)
    if not found.n:
        return "not run" if found.n_planned else "no planned seeds"
    text = rounded(found.mean, digits, signed=not unit)
    if not math.isfinite(found.low):
        return f"{text}{unit}, no interval"
    return f"{text} +- {found.high - found.mean:.{digits}f}{unit}"


def with_n(results, test):
    """Return the number of a test with its interval and n"""
    found = measured(results, test)
    draws = " sets" if "+" in test.mark.split()[1] else ""
    number = test_number(results, test)
    return f"{number} (n = {found.n}{draws})" if found.n else number


def decided(results, name):
    """Return the verdict on a claim of the papers and its reason, by the rule"""
    one = claims.BY_NAME[name]
    return rule.decide(one.tests, lambda test: measured(results, test), one.theirs, one.is_accuracy)


def verdict(results, name):
    """Return the verdict on a claim of the papers"""
    return decided(results, name)[0]


def reason(results, name):
    """Return the reason of a verdict: what the interval excludes and of which test it is, or why no
    test decides"""
    said, why = decided(results, name)
    one = claims.BY_NAME[name]
    if not why.startswith("from "):
        return why
    numbers = [test_number(results, test) for test in rule.nearest(one.tests) if test.label in why]
    return f"from {' and '.join(numbers)}: {excluded(said, one)}"


def counted(results, name):
    """Return how many tests of a claim are for it, against it, find none, or are open, as text"""
    one = claims.BY_NAME[name]
    return " / ".join(map(str, rule.count(one.tests, lambda test: measured(results, test), one.theirs,
                                          one.is_accuracy)))


def strongest(results, name):
    """Return the strongest control of a claim and our best CapsNet on the same data: of all controls
    with at least three seeds that with the highest mean, and of our networks there that with the
    highest mean. Return arms, our setting, the control's setting; None if there is none"""
    def mean_of(arms, setting):
        values = results.values(SHORT[arms.experiment], setting, arms.key)
        return sum(values.values()) / len(values) if len(values) >= rule.LEAST_SEEDS else None
    best = None
    for arms in claims.BY_NAME[name].arms:
        controls = {setting: mean for setting in arms.controls if (mean := mean_of(arms, setting)) is not None}
        ours = {setting: mean for setting in arms.ours if (mean := mean_of(arms, setting)) is not None}
        if controls and ours:
            control = max(controls, key=controls.get)
            if best is None or controls[control] > best[0]:
                best = controls[control], arms, max(ours, key=ours.get), control
    return best and best[1:]


def strongest_cell(results, name):
    """Return what README's table says of the strongest control"""
    found = strongest(results, name)
    if found is None:
        return ""
    arms, ours, control = found
    experiment = SHORT[arms.experiment]
    values = results.by_seed(experiment, ours, control, arms.key)
    mean, half = mean_and_interval(list(values.values()))
    mark = f"{arms.experiment} {ours} minus {control}, {arms.key}, points"
    pair = claims.Measure("", "", mark)
    if has_toys(pair):
        mean, half = crossed_interval(*toy_values(results, pair, values))
    names = arms.ours[ours], arms.controls[control]
    said = names[0] if names[0] == names[1] else f"{names[0]} minus {names[1]}"
    return f"{rounded(100 * mean, 1, signed=True)} +- {100 * half:.1f} (n = {len(values)}): {said}"


def nearest_cell(results, name):
    """Return what README's table says of the nearest test: the one with the most planned seeds run,
    of several the first"""
    near = rule.nearest(claims.BY_NAME[name].tests)
    shown = max(near, key=lambda test: measured(results, test).n)
    label = claims.SHORT.get(f"{name} {shown.name}", shown.label)
    number = with_n(results, shown)
    added = results.samples(*asked(shown.mark)[:4])
    if number == "not run" and len(added) == 1:
        number = f"not run; another seed: {drawn(results, *asked(shown.mark))}"
    return f"{label}: {number}"


def excluded(verdict, one):
    """Return what a verdict says that the interval includes and excludes; "" if it is from no interval"""
    paper = f"{one.theirs:g}%" if one.is_accuracy else f"{one.theirs:+g}"
    if one.is_accuracy:
        return {"reached": f"the interval is above {paper}", "lower": f"the interval is below {paper}",
                "undecided": f"{paper} is possible"}[verdict]
    return {"reproduced": f"above 0, and {paper} is possible", "smaller": f"above 0, below {paper}",
            "not found": f"0 is possible, {paper} is not", "opposite": "the interval is below 0",
            "undecided": f"both 0 and {paper} are possible"}[verdict]


def is_tuned_more(tried):
    """Return whether the capsules' configurations, the first of two, are more than the control's, so that
    a test in which capsules are ahead does not qualify. None: not recorded, which counts as more"""
    ours, control = tried
    return ours is None or control is not None and ours > control


def verdict_cell(results, name):
    """Return what README's table says of a verdict: the verdict, and why it is no other one"""
    one = claims.BY_NAME[name]
    said, why = decided(results, name)
    test = max(rule.nearest(one.tests), key=lambda test: measured(results, test).n)
    found = measured(results, test)
    if "tests differ" in why:
        return f"{said}: the nearest tests differ"
    if why.startswith("no nearest test") and found.n < rule.LEAST_SEEDS:
        seeds = "seeds" if found.n > 1 else "seed"
        text = f"{said}: {found.n or 'no'} planned {seeds} run, {rule.LEAST_SEEDS} needed"
        if not one.is_accuracy and is_tuned_more(found.tried):
            ours, control = ("unknown" if n is None else n for n in found.tried)
            text += f"; capsules tried {ours} settings, control {control}"
        return text
    if why.startswith("no nearest test") and found.lacks:
        return f"{said}: the interval over toys is not computed yet"
    if why.startswith("no nearest test"):
        return f"{said}: {rule.why_not(found, test.is_matched, one.is_accuracy)}"
    return f"{said}: {excluded(said, one)}"


def strongest_line(results, name):
    """Return the sentence of the claims page on a claim's strongest control; "" if there is none"""
    cell = strongest_cell(results, name)
    return f"Our best capsules minus our best control, all seeds: {cell}." if cell else ""


CLAIMS_FIGURE = "![the papers' effects beside ours](viz/findings/claims.png)"


def claims_table(results):
    """Return README's figure and table of claims"""
    rows = []
    for name, sentence, paper in claims.TABLE:
        rows.append([sentence, paper, nearest_cell(results, name), strongest_cell(results, name),
                     counted(results, name), verdict_cell(results, name)])
    header = ["claim", "paper", "nearest test, planned seeds", "best capsules minus best control, all seeds",
              "for / against / none found / open", "verdict: why"]
    return CLAIMS_FIGURE + "\n\n" + markdown(header, rows)


def claim_table(results, name):
    """Return the table of a claim's tests, the nearest first; of a finding, of its measures"""
    one = claims.BY_NAME[name]
    if not one.tests:
        return others_table(results, name)
    rows, near = [], rule.nearest(one.tests)
    for test in sorted(one.tests, key=rule.distance):
        found = measured(results, test)
        tried = " / ".join("?" if n is None else str(n) for n in found.tried)
        facts = [test.data, test.task, test.control or "-", test.network]
        label = f"**{test.label}**" if test in near else test.label
        said = rule.outcome(found, one.theirs, one.is_accuracy)
        every = drawn(results, *asked(test.mark))
        n = len(results.samples(*asked(test.mark)[:4]))
        rows.append([label, *facts, tried, f"{found.n} of {found.n_planned}", test_number(results, test),
                     said, f"{every} (n = {n})"])
    return markdown(["test", "data", "task", "control", "network", "configurations tried, capsules / control",
                     "planned seeds", "result, planned seeds", "alone it says", "all seeds, no toys in the interval"],
                    rows)


def others_table(results, name):
    """Return the table of a claim's measures that are no tests; one line if none of them has been run"""
    rows = []
    for _, label, mark in claims.BY_NAME[name].measures:
        experiment, first, other, key, styles = asked(mark)
        number = drawn(results, experiment, first, other, key, styles)
        rows.append([label, number, len(results.samples(experiment, first, other, key))])
    if rows and all(n == 0 for _, _, n in rows):
        return f"*None of {len(rows)} comparisons has been run yet ([plan](../../results/plans.md)).*"
    return markdown(["comparison", "result", "n"], rows)


# -------------------------------------------------------------- tables

def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def excludes_zero(values):
    """Return whether the 95% t interval of some numbers excludes zero"""
    mean, half = mean_and_interval(values) if values else (0, 0)
    return math.isfinite(half) and abs(mean) > half


def table(results, text):
    """Return the table that a mark describes, and the line on its seeds"""
    if text.strip() == "claims":
        return claims_table(results)
    kind, _, name = text.strip().partition(" ")
    if kind in ("claim", "others") and name in claims.BY_NAME:
        return (claim_table if kind == "claim" else others_table)(results, name)
    short, columns, *rows = *(line.strip() for line in text.splitlines() if line.strip()), "", ""
    rows = [row for row in rows if row]
    if short not in SHORT or not columns.startswith("columns: ") or not all(" = " in row for row in rows):
        raise InputError(f"must be one of {', '.join(SHORT)}, a line of columns, and lines LABEL = SETTING")
    experiment = SHORT[short]
    columns = [part.rpartition(" = ") for part in parts_of(columns.removeprefix("columns: "), "|")]
    rows = [(label, setting) for label, _, setting in (row.rpartition(" = ") for row in rows)]
    lines, first = [], rows[0][1]
    for label, setting in rows:
        cells = []
        for _, _, what in columns:
            key, *styles = parts_of(what, ",")
            minus = first if key.endswith(" minus first") else ""
            cell = drawn(results, experiment, setting, minus, key.removesuffix(" minus first"), styles_of(styles))
            if minus and excludes_zero(results.samples(experiment, setting, minus, key.removesuffix(" minus first"))):
                cell = f"**{cell}**"
            cells.append("" if setting == minus else cell)
        lines.append([label, *cells])
    header, counts = ["", *(heading for heading, _, _ in columns)], [
        seeds_of(results, experiment, [setting]) for _, setting in rows]
    line = seeds_line(results, experiment, [setting for _, setting in rows])
    if len(set(counts)) > 1:                               # a column says what the line could say only as a range
        header, lines = [*header, "seeds"], [[*cells, count] for cells, count in zip(lines, counts)]
        line = line.partition(".")[2].strip()
    text = markdown(header, lines)
    return f"{text}\n\n{line}" if line else text


def seeds_of(results, experiment, settings):
    """Return how many seeds some settings have, as "5" or "3 to 10", and of how many planned if some are missing"""
    settings = one_by_one(settings)
    made = [len(results.runs(experiment, setting)) for setting in settings]
    asked = [len(PLANNED[experiment, setting]) for setting in settings]
    few, plan = (" to ".join(map(str, sorted({min(counts), max(counts)}))) for counts in (made, asked))
    return few if made == asked else f"{few} of {plan}"


def seeds_line(results, experiment, settings):
    """Return how many seeds some settings have, of how many planned, and which results are stale"""
    text = seeds_of(results, experiment, settings)
    old = [setting for setting in one_by_one(settings) if (experiment, setting) in results.stale]
    line = f"Seeds: {text} planned." if " of " in text else f"Seeds: {text}."
    return f"{line} **Stale**: {', '.join(old)}." if old else line


def one_by_one(settings):
    """Return settings, of which those over several draws of the data (TABLE+TABLE/SETTING) are one for each draw"""
    return [f"{table}/{setting.partition('/')[2]}" for setting in settings
            for table in setting.partition("/")[0].split("+")]


# -------------------------------------------------------------- the results logs

COLUMNS = {                        # of a results log, if a run has them: heading -> keys, of which the first is shown
    "exact match": ("test_exact_match", "nearest"), "test": ("test_accuracy", "nearest.test"),
    "statistics as in training": ("validation.as_in_training",), "layer by layer": ("validation.layer_by_layer",),
    "translated": ("familiar_accuracy", "nearest.familiar"),
    "any position": ("any_position_accuracy", "nearest.any_position"),
    "affine, centered": ("centered_accuracy", "nearest.centered"),
    "affine, any position": ("affine_accuracy", "nearest.affine"), "familiar": ("familiar",), "novel": ("novel",),
    "MSE per pixel": ("test_recon_mse",), "after the sign attack": ("sign_attack.vote",),
    "AUROC, noise": ("detection.noise.length", "detection.noise.probability"),
    "activation, background": ("background_activity.after.a.primary.0",),
    "activation, toy": ("background_activity.after.a.primary.1",),
    "R\u00b2, x": ("dimensions.trained.x",), "R\u00b2, rotation": ("dimensions.trained.rotation",),
    "R\u00b2, thickness": ("dimensions.trained.thickness",),
    "random coefficients": ("coefficients.random.exact_match",),
    "robustness, PGD, capsules": ("robustness.matrix-capsnet.pgd", "robustness.capsnet.pgd"),
    "robustness, PGD, CNN": ("robustness.cnn.pgd", "robustness.cnn-dense.pgd"),
    "robustness, PGD, GAP-CNN": ("robustness.cnn-gap.pgd",)}


def results_log(results, experiment):
    """Return the results log of an experiment: a table for each table of runs"""
    title = (ROOT / "docs" / f"{experiment}.md").read_text("utf-8").splitlines()[0].removeprefix("# ")
    text = [f"# {title}: results log", "Every run behind the chapter, generated from the `.jsonl` files in this folder "
            "by `python3 results/render.py`. Each line of these files holds a run's settings, versions, machine and "
            "history.",
            "Mean \u00b1 95% t interval over seeds; after a slash, half the width of the 95% interval of one run, from "
            "its test images. For one seed, that interval is in parentheses. N of M: N of M listed seeds have been "
            "run. A run with `--stop-at` that does not reach its accuracy is not in the means. A row on a trained "
            "network gives the minutes of its training, on as many threads as its settings say. Flags are those of "
            f"`{experiment}.py`, without `--seed`; `{{run}}` is the folder of the run that a row comes after."]
    tables = {}
    for (name, setting), planned in PLANNED.items():
        if name == experiment:
            tables.setdefault(setting.split("/")[0], []).append((setting, planned))
    for name, rows in tables.items():
        text += [f"## {name}", runs.CAPTIONS[experiment, name], with_signs(log_table(results, experiment, rows)),
                 made_with(results, experiment, [setting for setting, _ in rows])]
    return "\n\n".join(part for part in text if part) + "\n"


def log_table(results, experiment, rows):
    """Return a table of a results log. rows: (setting, its planned runs)"""
    found = {setting: list(results.runs(experiment, setting).values()) for setting, _ in rows}
    some = [run for results in found.values() for run in results]
    shown = {heading: keys for heading, keys in COLUMNS.items() if any(key_of(run, keys) for run in some)}
    lines = []
    for setting, planned in rows:
        cells = [f"{len(found[setting])} of {len(planned)}"]
        for heading, keys in shown.items():
            key = next(filter(None, (key_of(run, keys) for run in found[setting])), None)
            images = [interval for run in found[setting] if key and (interval := lookup(run, f"{key}_ci95"))]
            half = sum(high - low for low, high in images) / 2 / len(images) if images else None
            cells.append("" if not key else log_cell(results, experiment, setting, key, heading) +
                         (f" / {half:.3f}" if half and len(images) > 1 else ""))
        for key, factor in (("n_params", 1), ("seconds_train", 1 / 60)):
            numbers = [run[key] * factor for run in found[setting] if key in run]
            cells.append(f"{sum(numbers) / len(numbers):,.{int(factor < 1)}f}" if numbers else "")
        flags = dict.fromkeys(re.sub(r" --seed \d+", "", each.flags.strip()) for each in planned)
        flags = [planned[0].flags.strip(), *list(flags)[1:]]
        lines.append([setting.split("/")[1], *cells, "; other seeds: ".join(f"`{words}`" for words in flags)])
    header = ["", "seeds", *shown, "parameters", "minutes", "flags, or the command"]
    return markdown(header, lines)


def key_of(run, keys):
    """Return the first of some keys of which a result has a number, or None"""
    return next((key for key in keys if isinstance(lookup(run, key), (int, float))), None)


def log_cell(results, experiment, setting, key, heading):
    """Return a number of a results log; empty if not every seed has it"""
    try:
        styles = {"MSE per pixel": ("4 digits",), "AUROC, noise": ("2 digits", "range")}.get(heading, ())
        return drawn(results, experiment, setting, "", key, styles)
    except (KeyError, IndexError, TypeError):              # not every seed has it
        return ""


def made_with(results, experiment, settings):
    """Return the machines and versions of some settings' results, and which are stale"""
    found = [run for setting in settings for run in results.runs(experiment, setting).values()]
    machines = sorted({f"{run['machine']['processor']}, Python {run['versions']['python']}, NumPy "
                       f"{run['versions']['numpy']}" for run in found})
    old = [setting.split("/")[1] for setting in settings if (experiment, setting) in results.stale]
    line = f"{'; '.join(machines)}." if machines else ""
    return f"{line} **Stale**, to be run again: {', '.join(old)}." if old else line


# -------------------------------------------------------------- pictures

GRAY = "#777777"                   # of intervals; the other colors are those of lab.figures
OF_AUROC = "AUROC, digits against noise (chance 0.5)"
PICTURES = {                       # README's figures: name -> axis label, reference line, its two sides, rows
    "translation": ("difference in accuracy on affine digits, percentage points", 0, ("CNN better", "CapsNet better"), [
        "CapsNet minus CNN, trained on digits translated by up to 6 pixels, stopped at 98% validation accuracy",
        ("any position, CNN with max pooling", "claim affnist-translation matched-vs-max-pooling"),
        ("any position, narrow CNN", "claim affnist-translation matched-vs-narrow-cnn"),
        ("any position, CNN as wide as the CapsNet",
         "claim affnist-translation matched-vs-wide-cnn"),
        ("centered, CNN with max pooling", "claim affnist-centered matched-vs-max-pooling"),
        ("centered, narrow CNN", "claim affnist-centered matched-vs-narrow-cnn"),
        ("centered, CNN as wide as the CapsNet", "claim affnist-centered matched-vs-wide-cnn"),
        "trained on digits at any position, stopped at 95% validation accuracy",
        ("any position, narrow CNN", "claim affnist-any-position matched"),
        "trained on 96,000 digits translated by up to 6 pixels",
        ("any position, CNN with max pooling", "claim affnist-equal-training vs-max-pooling"),
        ("any position, narrow CNN", "claim affnist-equal-training vs-narrow-cnn"),
        ("centered, narrow CNN", "claim affnist-centered equal-training-vs-narrow-cnn"),
        "trained on 96,000 digits at any position",
        ("any position, narrow CNN", "claim affnist-any-position equal-training")]),
    "pooling": ("difference in accuracy on affine digits, percentage points", 0, (
        "worse", "better"), [
        "each network minus a CapsNet with shared matrices and 1 iteration, any position",
        ("ten average-pooled class vectors (vector-gap)",
         "claim affnist-pooling vector-gap-vs-capsnet-shared"),
        ("ten max-pooled class vectors (vector-gmp)",
         "affnist backbone/vector-gmp minus backbone/capsnet-shared, affine_accuracy"),
        ("CNN with global max pooling (cnn-gmp)",
         "claim affnist-pooling cnn-gmp-vs-capsnet-shared"),
        ("CNN with global average pooling (cnn-gap)",
         "affnist backbone/cnn-gap minus backbone/capsnet-shared, affine_accuracy"),
        ("CapsNet, a matrix per position, 1 iteration",
         "affnist backbone/capsnet-iters-1 minus backbone/capsnet-shared, affine_accuracy"),
        ("CapsNet, a matrix per position, 3 iterations",
         "affnist backbone/capsnet minus backbone/capsnet-shared, affine_accuracy")]),
    "routing": ("difference in accuracy, percentage points", 0, ("1 iteration better", "more iterations better"), [
        "MultiMNIST, exact match: trained with 3 iterations minus trained with 1",
        ("default network, 72,000 pairs", "claim multimnist-routing default-network"),
        ("classic (the paper's, narrow), 72,000 pairs", "claim multimnist-routing classic"),
        ("half-digit, 72,000 pairs", "claim multimnist-routing half-digit"),
        ("half-digit, 360,000 pairs", "claim multimnist-routing half-digit-long"),
        ("residual, 1.2 million pairs", "claim multimnist-routing residual"),
        ("residual, 1.92 million of the paper's pairs",
         "claim multimnist-routing paper-pairs-recomputed"),
        "a matrix per position: trained with 3 iterations minus trained with 1",
        ("affine digits", "claim multimnist-routing affine-digits"),
        ("toys at novel azimuths", "claim multimnist-routing novel-azimuths"),
        "trained with 3 iterations: tested with 3 minus tested with 1",
        ("MultiMNIST, default network", "claim multimnist-switched-off default-network"),
        ("MultiMNIST, half-digit", "claim multimnist-switched-off half-digit"),
        ("affine digits, a matrix per position", "claim multimnist-switched-off affine-digits"),
        "EM routing, toys: trained with 2 iterations minus trained with 1",
        ("matrix-capsnet, novel azimuths", "claim em-routing matrix-capsnet-2-vs-1-novel"),
        ("matrix-head, novel azimuths", "claim em-routing matrix-head-2-vs-1-novel"),
        ("matrix-head, novel elevations", "claim em-routing matrix-head-2-vs-1-novel-elevations")]),
    "confidence": (OF_AUROC, 0.5, ("noise rated higher", "digits rated higher"), [
        ("CapsNet, matrix per position, 3 iterations: longest",
         "claim confidence-on-noise capsnet-longest"),
        ("CapsNet, shared matrices, 1 iteration: longest",
         "claim confidence-on-noise capsnet-shared-longest"),
        ("the same: longest minus second longest",
         "claim confidence-on-noise capsnet-shared-margin"),
        ("ten pooled vectors: longest vector", "claim confidence-on-noise vector-gap-longest"),
        ("GAP-CNN: largest softmax probability", "claim confidence-on-noise cnn-gap-probability")])}


def pictures(results, folder, say=print):
    """Draw README's figures into a folder. Raise InputError if a result is missing."""
    from lab import figures
    folder.mkdir(parents=True, exist_ok=True)
    figures.write_figure(claims_picture(results), folder / "claims.png", say)
    for name, (axis_label, line, sides, rows) in PICTURES.items():
        scale, drawn_rows = 1 if line == 0.5 else 100, []
        for row in rows:
            if isinstance(row, str):
                drawn_rows.append((row, None))
                continue
            label, mark = row
            experiment, one, other, key, _ = (measure(mark.removeprefix("claim ")) if mark.startswith("claim ")
                                              else asked(mark))
            values = results.samples(experiment, one, other, key)
            if not values:
                lacking = " or ".join(filter(None, (one, other)))
                raise InputError(f"{lacking} has no result, and the figure {name} needs it. Run it first")
            drawn_rows.append((label, [scale * value for value in values]))
        figures.write_figure(dot_plot(drawn_rows, axis_label, line, sides), folder / f"{name}.png", say)


PANELS = (                         # of the figure of all claims: axis label, limits, names of claims
    ("difference in accuracy, percentage points", (-13, 17), (
        "multimnist-cnn", "multimnist-routing", "affnist-translation", "smallnorb-azimuth",
        "smallnorb-elevation", "em-routing")),
    ("accuracy, %", (92, 100.5), ("multimnist-accuracy", "mnist")))
SHORT_CLAIMS = {
    "multimnist-cnn": "two digits, against a CNN", "multimnist-routing": "3 routing iterations against 1",
    "em-routing": "3 EM iterations against 1", "affnist-translation": "affine digits, against a CNN",
    "smallnorb-azimuth": "novel azimuths, against a CNN",
    "smallnorb-elevation": "novel elevations, against a CNN",
    "multimnist-accuracy": "two overlapping digits", "mnist": "MNIST"}


def claims_picture(results):
    """Return a Figure of the papers' claims: each test a point with its interval, the nearest ones
    large, and the paper's number"""
    from lab.figures import BLUE

    from matplotlib.figure import Figure
    fig = Figure((8, 6.6), layout="constrained")
    panels = fig.subplots(2, 1, gridspec_kw={"height_ratios": [len(names) + 0.8 for *_, names in PANELS]})
    for axes, (axis_label, limits, names) in zip(panels, PANELS):
        for y, name in enumerate(names):
            one = claims.BY_NAME[name]
            axes.plot([one.theirs], [y - 0.42], "D", markerfacecolor="none", color="black", markersize=8,
                      label="paper's number", clip_on=False, zorder=5)
            near, tests = rule.nearest(one.tests), sorted(one.tests, key=rule.distance)
            shown = [(test, found) for test in tests if (found := measured(results, test)).n]
            for k, (test, found) in enumerate(shown):
                at = y - 0.28 + 0.66 * (k + 0.5) / len(shown)
                color, size, width = (BLUE, 7, 2.5) if test in near else (GRAY, 3.5, 1)
                label = "nearest tests" if test in near else "other tests"
                has_interval = math.isfinite(found.low)
                if has_interval:
                    axes.plot([found.low, found.high], [at, at], color=color, linewidth=width,
                              solid_capstyle="butt")
                axes.plot([found.mean], [at], "o", color=color, markersize=size,
                          markerfacecolor=color if has_interval else "white", label=label)
            axes.annotate(f"{verdict(results, name)}  ({counted(results, name)})", (1.01, y),
                          xycoords=("axes fraction", "data"), va="center", fontsize=9)
        for y in range(len(names) - 1):
            axes.axhline(y + 0.47, color="#DDDDDD", linewidth=0.8)
        if limits[0] < 0:
            axes.axvline(0, color="black", linewidth=1)
        axes.set_yticks(range(len(names)), [SHORT_CLAIMS[name] for name in names])
        axes.set_ylim(len(names) - 0.5, -0.65)
        axes.set_xlim(limits)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.set_xlabel(axis_label)
    panels[0].annotate("verdict  (for / against / none / open)", (1.01, -0.6),
                       xycoords=("axes fraction", "data"), va="center", fontsize=8, color=GRAY)
    known = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels())}
    fig.legend(known.values(), known.keys(), loc="outside upper left", ncols=3, frameon=False)
    fig.supxlabel("line: 95% CI over planned seeds, and over toys; hollow: without an interval", fontsize=9)
    return fig


def dot_plot(rows, axis_label, line=None, sides=(), unit="seeds"):
    """Return a Figure: each seed a dot, the mean with its 95% t interval, on an axis that is cropped to them; of AUROCs
    with the range of the seeds, since a t interval can leave 0..1.

    rows: (label, numbers), or (heading, None). line: where a vertical line is drawn, or None; an interval that excludes
    it is blue, one that includes it gray. sides: what lies to the left and to the right of the line.
    """
    from lab.figures import BLUE

    from matplotlib.figure import Figure
    fig = Figure((8, 0.34 * len(rows) + (1.5 if sides else 1.2)), layout="constrained")
    axes = fig.subplots()
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["left", "right", "top"]].set_visible(False)
    labels, interval = [], "range of the seeds" if "AUROC" in axis_label else "95% CI"
    for y, (label, values) in enumerate(rows):
        if values is None:
            labels.append("")
            axes.annotate(label, (0.01, y), xycoords=("figure fraction", "data"), va="center", fontweight="bold",
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1}, in_layout=False)
            continue
        labels.append(f"{label}  (n = {len(values)})")
        mean, half = mean_and_interval(values)
        low, high = (mean - half, mean + half) if "CI" in interval else (min(values), max(values))
        color = BLUE if line is None or low > line or high < line else GRAY             # nan: gray
        axes.plot(values, [y + 0.22] * len(values), "o", color="black", alpha=0.45, markersize=3, markeredgewidth=0)
        if math.isfinite(half):
            axes.plot([low, high], [y - 0.08] * 2, color=color, linewidth=2.5, solid_capstyle="butt")
        axes.plot([mean], [y - 0.08], "o" if math.isfinite(half) else "D", color=color, markersize=7)
    if line is not None:
        axes.axvline(line, color="black", linewidth=1)
    if "AUROC" in axis_label:
        axes.set_xlim(-0.02, 1.02)
    axes.set_yticks(range(len(rows)), labels)
    if sides:
        for text, align in ((f"\u2190 {sides[0]}  ", "right"), (f"  {sides[1]} \u2192", "left")):
            axes.annotate(text, (line, 1), xycoords=("data", "axes fraction"), xytext=(0, 4), ha=align,
                          textcoords="offset points", va="bottom", fontsize=9)
    colors = "" if line is None else f"\nblue: the {interval} excludes {line}; gray: it includes {line}"
    one = "; diamond: n = 1, no CI" if any(values and len(values) == 1 for _, values in rows) else ""
    fig.supxlabel(f"{axis_label}\nlarge dot and line: mean and {interval}; small dots: n {unit}{one}{colors}",
                  fontsize=9)
    return fig


def forest(results, experiment, lines, metric="accuracy"):
    """Return a dot plot, a Figure, of paired differences.

    lines: (label, first setting, second setting, metric key), or a heading. With ", reversed" after the key, which
    matters where the first is stopped at the second's accuracy, the difference is the second minus the first.
    Differences without results, and headings without differences, are left out. metric: what the axis calls the metric.
    """
    rows = []
    for line in lines:
        values = None
        if not isinstance(line, str):
            key, _, style = line[3].partition(", ")
            values = [(-100 if style else 100) * x for x in results.samples(experiment, *line[1:3], key)]
        if values is None or values:
            rows.append((line if values is None else line[0], values))
    if all(values is None for _, values in rows):
        raise InputError(f"--results {results.folder}: holds no results of {experiment}. Give another folder")
    rows = [row for row, after in zip(rows, [*rows[1:], ("", None)]) if row[1] or after[1]]         # no empty group
    unit = "seeds, or sets of toys" if any("+" in line[1] for line in lines if not isinstance(line, str)) else "seeds"
    return dot_plot(rows, f"difference in {metric}, percentage points", 0, ("second better", "first better"), unit)


# -------------------------------------------------------------- the documents

KINDS = "table|value|claim|verdict|reason|count|strongest"
MARK = re.compile(rf"<!-- ({KINDS}): ((?:(?!-->).)*?)\s*-->((?:(?!<!--).)*)<!-- end -->", re.S)
PART = re.compile(rf"<!--\s*(?:{KINDS}|end)\b.*?-->", re.S)


def filled(kind, what, results, name):
    """Return the text that a mark of a document asks for, with the signs that documents have"""
    try:
        renderers = {"table": table, "value": value, "claim": claim, "verdict": verdict, "reason": reason,
                     "count": counted, "strongest": strongest_line}
        body = renderers[kind](results, what)
    except InputError as error:
        raise InputError(f"{name}: the {kind} {what!r}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{name}: the {kind} {what!r}: a result behind it lacks something ({error!r}); make it anew, "
                         "or name another key") from None
    return with_signs(body)


def with_signs(text):
    """Return a text with a minus sign and \u00b1 where it has - before a number and +-"""
    return re.sub(r"(?<![\w.`-])-(?=\d)", "\u2212", text.replace(" +- ", " \u00b1 "))


def rendered(text, results, name):
    """Return a document's text with every table and number rendered again"""
    if damaged := PART.search(MARK.sub("", text)):           # what is no whole mark would take the text to the next end
        raise InputError(f"{name}: {damaged[0]!r} is no whole mark; write <!-- table: ... -->, value or claim, "
                         "and after its text <!-- end -->; nothing was changed")

    def put(match):
        mark, body = match[0][:match.start(3) - match.start(0)], filled(match[1], match[2], results, name)
        return mark + (f"\n{body}\n" if match[1] == "table" else body) + "<!-- end -->"
    return MARK.sub(put, text)


def documents(root):
    """Return the paths of the documents"""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def check_folder(folder):
    """Raise InputError if a folder holds no results"""
    if not any(Path(folder).glob("*/*.jsonl")):
        fault = "holds no results (EXPERIMENT/TABLE.jsonl)" if Path(folder).is_dir() else "no such folder"
        raise InputError(f"--results {folder}: {fault}. Give the folder that holds the results")


def render(root, folder, check=False, into=None, say=print):
    """Rewrite the documents, or only compare them, or write them into another folder. Return how many differ."""
    check_folder(folder)
    results, texts = Results(folder), {path: path.read_text("utf-8") for path in documents(root)}
    made = {path: rendered(text, results, path.name) for path, text in texts.items()}    # all, before one is written
    for experiment in runs.EXPERIMENTS:
        path = root / "results" / experiment / "README.md"
        texts[path] = path.read_text("utf-8") if path.exists() else ""
        made[path] = results_log(results, experiment)
    differing = [path for path in made if made[path] != texts[path]]
    for path in made if into else differing:
        new, name = made[path], path.relative_to(root).as_posix()
        if check and not into:
            pairs = enumerate(zip([*texts[path].splitlines(), ""], [*new.splitlines(), ""]), 1)
            line = next((k for k, (old_line, new_line) in pairs if old_line != new_line), 1)
            say(f"{name}: line {line} is not what results/ says; run python3 results/render.py")
            continue
        target = Path(into or root) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, lambda file, new=new: file.write(new.encode()))
        say(f"rewrote {target}")
    return len(differing)


def main():
    parser = Parser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--check", action="store_true", help="compare only; exit code 1 where a document differs")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="where the results are")
    parser.add_argument("--into", type=Path, metavar="DIR", help="write the documents there, and leave these alone")
    which.add_argument("--pictures", action="store_true", help="draw README's pictures and nothing else")
    args = parser.parse_args()
    if args.check and args.into:
        raise InputError("--check compares, and writes nothing. Leave --into out")
    if args.pictures:
        from lab import figures
        check_folder(args.results)
        with figures.style():
            pictures(Results(args.results), (args.into or ROOT) / "viz" / "findings")
        return
    sys.exit(1 if render(ROOT, args.results, args.check, args.into) and args.check else 0)


if __name__ == "__main__":
    run_cli(main)

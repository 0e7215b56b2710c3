"""Blocks that several scripts hold between banner lines are the same to the letter, and nothing else is there twice."""
import ast
import collections
import itertools
import re

import pytest
from conftest import ROOT

SCRIPTS = {path.name: path.read_text() for path in sorted(ROOT.glob("*.py"))}
CORES = [name for name, text in SCRIPTS.items() if re.search("^# TWIN core", text, re.M)]


def blocks(text):
    """{name: text between its banner lines} of all twin blocks, each of which must be closed before the next begins"""
    found, name = {}, None
    start = 0
    for banner in re.finditer(r"^# (END )?TWIN ([a-z0-9 ]+)[^\n]*\n?", text, re.M):
        end, called = banner[1], banner[2].strip()
        if end:
            assert called == name, f"END TWIN {called} closes {name}"
            found[name], name = text[start:banner.start()], None
        else:
            assert name is None and called not in found, f"TWIN {called} begins within {name}, or a second time"
            name, start = called, banner.start()
    assert name is None, f"TWIN {name} is not closed"
    return found


def outside(text):
    """text without its twin blocks"""
    for block in blocks(text).values():
        text = text.replace(block, "")
    return text


def definitions(text):
    """{name: source} of the functions and classes at top level, decorators included"""
    return {node.name: "\n".join(map(ast.unparse, (*node.decorator_list, node))) for node in ast.parse(text).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


TWINS = collections.defaultdict(dict)
for script in SCRIPTS:
    for title, block in blocks(SCRIPTS[script]).items():
        TWINS[title][script] = block


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_the_same_to_the_letter(name):
    (first, expected), *others = TWINS[name].items()
    for script, text in others:
        for k, (a, b) in enumerate(itertools.zip_longest(expected.splitlines(), text.splitlines())):
            assert a == b, f"TWIN {name}, line {k + 1}: {first} has\n{a}\n{script} has\n{b}"
        assert text == expected


def test_every_experiment_has_the_core():
    """An experiment is a script that others import and that imports none"""
    imported = {name for text in SCRIPTS.values() for name in re.findall(r"^(?:import|from) (\w+)", text, re.M)}
    assert CORES == [name for name in SCRIPTS if name.removesuffix(".py") in imported] and len(CORES) >= 2


@pytest.mark.parametrize("script", CORES)
def test_a_script_is_settings_task_paper_core_main_in_this_order(script):
    text = SCRIPTS[script]
    banners = [text.index(banner) for banner in ("# TWIN preamble", "# END TWIN preamble", "\nclass Config(",
                                                 "# TWIN core", "# END TWIN core", "\ndef main(")]
    assert banners == sorted(banners)
    assert all(banners[1] < text.index(f"\ndef {name}(") < banners[3] for name in ("forward", "evaluate", "train"))


@pytest.mark.parametrize("script", CORES)
def test_the_banner_of_the_core_is_the_first_comment_that_names_it(script):
    naming = [line for line in SCRIPTS[script].splitlines() if "#" in line and "TWIN core" in line]
    assert naming[0].startswith("# TWIN core") and naming[1].startswith("# END TWIN core") and len(naming) == 2


@pytest.mark.parametrize("script", CORES)
def test_after_the_core_there_is_only_main(script):
    after = ast.parse(SCRIPTS[script].split("# END TWIN core")[1].split("\n", 1)[1]).body
    after = [node for node in after if not isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [type(node) for node in after] == [ast.FunctionDef, ast.If] and after[0].name == "main"
    assert ast.unparse(after[1]) == "if __name__ == '__main__':\n    run_cli(main)"


@pytest.mark.parametrize("script", CORES)
def test_a_block_that_only_some_share_touches_the_core(script):
    """Nothing stands between the MNIST block and the core's"""
    if "mnist" in blocks(SCRIPTS[script]):
        between = SCRIPTS[script].split("# END TWIN mnist")[1].split("# TWIN core")[0].split("\n", 1)[1]
        assert not between.strip()


def test_nothing_is_defined_twice_outside_the_blocks():
    """The same source under whatever name, in two scripts: it belongs into a block, or into the one that is imported"""
    where = collections.defaultdict(list)
    for script, text in SCRIPTS.items():
        for name, source in definitions(outside(text)).items():
            where[source.replace(f" {name}(", " _(", 1)].append(f"{script}: {name}")
    assert not [places for places in where.values() if len(places) > 1]


@pytest.mark.parametrize("text, fault", [
    ("# TWIN a ---\nx = 1\n", "not closed"), ("# TWIN a ---\n# TWIN b ---\n# END TWIN b\n", "begins within"),
    ("# TWIN a\n# END TWIN b\n", "closes"), ("# TWIN a\n# END TWIN a\n# TWIN a\n# END TWIN a\n", "a second time")])
def test_a_block_left_open_is_found(text, fault):
    with pytest.raises(AssertionError, match=fault):
        blocks(text)


def test_blocks_by_hand():
    text = "x = 1\n# TWIN a b: text ---\ny = 2\n# END TWIN a b ----\nz = 3\n# TWIN c\n# END TWIN c\n"
    assert blocks(text) == {"a b": "# TWIN a b: text ---\ny = 2\n", "c": "# TWIN c\n"}
    assert "y = 2" not in outside(text) and "x = 1" in outside(text) and "z = 3" in outside(text)

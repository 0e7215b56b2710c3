"""README.md and docs/: every command parses, every link leads to a file and a heading, every flag and name is real, and
every example runs."""
import importlib
import json
import re
import shlex
import sys
import tempfile
import tokenize

import pytest
from conftest import ROOT, configs, run_offline

sys.path.insert(0, str(ROOT / "workflow"))
import runs  # noqa: E402
from runs import EXPERIMENTS  # noqa: E402

DOCUMENTS = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
FLAG = r"(?<![\w-])--[a-z][a-z0-9-]*"


@pytest.fixture(scope="module", params=DOCUMENTS)
def document(request):
    """name and text of each document"""
    return request.param, (ROOT / request.param).read_text("utf-8")


@pytest.fixture(scope="module")
def flags_of(run_script, help_of):
    """flags_of(script) -> the flags that its --help lists; each script is asked once"""
    known = {}

    def ask(script):
        if script not in known:
            if script not in help_of:
                done = run_script(script, "--help")
                assert done.returncode == 0, f"{script}: {done.stderr}"
                help_of[script] = done.stdout
            known[script] = set(re.findall(FLAG, help_of[script]))
        return known[script]

    return ask


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def code_blocks(text):
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)
    indented = re.findall(r"(?:^(?: {4}|\t)[^\n]*\n?)+", text, re.M)
    inline = re.findall(r"`(python3 [^`]*)`", without_code(text))
    return "\n".join(fenced + indented + [command.replace("\n", " ") for command in inline]).replace("\\\n", " ")


def commands(text):
    """The command lines `python3 script.py ...` of all code blocks and inline code, as lists of words; path/to/clone/
    stands for the folder of this project"""
    text = text.replace("python3 path/to/clone/", "python3 ")
    lines = (shlex.split(line, comments=True) for line in re.findall(r"python3 (?!-c )([^\n|>&;]*)", code_blocks(text)))
    return [words for words in lines if words and not words[0].startswith("-")]


def test_every_command_parses(document, flags_of):
    every_command_parses(*document, flags_of)


def test_every_command_of_the_workflow_parses(flags_of):
    drawn = [command for command, *_ in (*runs.FIGURES.values(), *runs.ANIMATIONS.values())]
    made = [result.flags for result in runs.RESULTS if "python3" in result.flags]
    every_command_parses("workflow/runs.py", "".join(f"    {command}\n" for command in drawn + made), flags_of)


def every_command_parses(name, text, flags_of):
    """Flags are those of --help; of an experiment they have values, and go together. compare.py also takes the flags of
    the experiment that it is given, and in quotes those of a variant"""
    for script, *words in commands(text):
        assert (ROOT / script).is_file(), f"{name} runs {script}, which is not there"
        known = flags_of(script)
        if script == "compare.py" and words[0] in EXPERIMENTS:
            known = known | flags_of(f"{words[0]}.py")
            variants = [after for word, after in zip(words, words[1:]) if word == "--variant"]
            words = [word for word in words if word not in variants]
            words += [word for variant in variants for word in shlex.split(variant)]
        elif script == "compare.py":                                    # of the experiment that is loaded
            known = known.union(*(flags_of(f"{name}.py") for name in EXPERIMENTS))
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in known, f"{name} gives {script} the flag {word}"
        if script.removesuffix(".py") in EXPERIMENTS and "--help" not in words:
            configs(script.removesuffix(".py"), words)


def anchors_of(text):
    """Return the fragments of a document's headings, as GitHub makes them, and of its HTML anchors"""
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#+ +(.*?) *#*$", without_code(text), re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug, n = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-"), 0
        while (anchor := f"{slug}-{n}" if n else slug) in found:
            n += 1
        found.add(anchor)
    return found


def test_every_image_and_link_exists(document):
    """Images are files of the project; a link's fragment is a heading of the document that it leads to"""
    name, text = document
    for image in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text) + re.findall(r"<img[^>]*src=[\"']([^\"']+)", text):
        assert ((ROOT / name).parent / image).is_file(), f"{name} shows {image}, which is not there"
    for link in re.findall(r"\]\(([^)\s]+)", without_code(text)):
        path, _, fragment = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if not link.startswith("http"):
            assert target.is_file(), f"{name} points to {path}, which is not there"
            known = anchors_of(target.read_text("utf-8")) if fragment else set()
            assert not fragment or fragment in known, f"{name} points to {link}, which has no such heading"


def test_headings_become_the_fragments_that_github_makes():
    text = "# A *b*: `c_d`, e\n## A b c_d e\n```\n# no heading\n```\n### [Text](link.md) 1.5\n## A b c_d e ##\n"
    assert anchors_of(text) == {"a-b-c_d-e", "a-b-c_d-e-1", "a-b-c_d-e-2", "text-15"}


def test_every_flag_named_is_real(document, flags_of):
    name, text = document
    prose = re.sub(r"`(python3|snakemake) [^`]*`", "", without_code(text))
    prose = "\n".join(line for line in prose.splitlines() if "-m pytest" not in line and "-m pip" not in line)
    scripts = {path.name for path in ROOT.glob("*.py")}
    scripts |= {words[0] for words in commands(text)}
    known = set().union(*map(flags_of, sorted(scripts)))
    assert not (unknown := set(re.findall(FLAG, prose)) - known), f"{name} names flags that no script has: {unknown}"


@pytest.fixture(scope="module")
def words_of_code():
    """All names and words of texts in the code, but for comments and docstrings"""
    folders = [ROOT, *(ROOT / name for name in ("tests", "workflow", "results", "conformance/examples",
                                                "conformance/tests", "conformance/capsule_conformance", "bench"))]
    known = {"_backward", "sacct"}                             # the end of some names; a program of Slurm
    for path in (path for folder in folders for path in folder.glob("*.py")):
        with tokenize.open(path) as file:
            known.update(word for token in tokenize.generate_tokens(file.readline)
                         if token.type != tokenize.COMMENT and not token.string.startswith('"""')
                         for word in re.findall(r"\w+", token.string))
    return known


def test_every_name_is_in_the_code(document, words_of_code):
    """Words in code type are names or texts of the code, not only words of its comments and docstrings"""
    name, text = document
    words = {word for word in re.findall(r"`([^`]+)`", without_code(text)) if word.isidentifier()}
    assert not (gone := words - words_of_code), f"{name} names {gone}"


def test_the_notebook_was_run_without_an_error_and_shows_its_figures():
    """and asks modules for what they have"""
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text("utf-8"))["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    source = "".join(line for cell in cells for line in cell["source"])
    for module, name in re.findall(r"\b(micro|capsnet|viz|figures|networks)\.(\w+)", source):
        full = {"micro": "microcapsnet", "capsnet": "multimnist_capsnet",
                "viz": "visualize_multimnist_capsnet"}.get(module, f"lab.{module}")
        assert hasattr(importlib.import_module(full), name), name


def test_the_project_asks_for_what_its_requirements_ask_for():
    """pyproject.toml, for uv, and requirements.txt, for pip; the license is named everywhere"""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    project, dev = re.search(r'dependencies = \[(.*?)\]', text)[1], re.search(r'\ndev = \[(.*?)\]', text)[1]
    asked = (ROOT / "requirements.txt").read_text("utf-8").split()
    assert re.findall(r'"(.*?)"', project) + re.findall(r'"(.*?)"', dev) == asked
    assert 'requires-python = ">=3.10"' in text and 'license = "MIT"' in text
    assert "license: MIT" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert "LICENSE" in (ROOT / "README.md").read_text("utf-8")
    assert (ROOT / "LICENSE").read_text("utf-8").startswith("MIT License")


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("*.py")))
def test_a_script_says_what_it_needs(script):
    """Inline metadata (PEP 723), by which `uv run` sets up what the script and its siblings import, and those that it
    starts from the run list, at the versions of requirements.txt"""
    started = {match[1] for result in runs.RESULTS if (match := re.match(r"python3 (\w+)\.py", result.flags))}
    scripts = {path.stem: path.read_text("utf-8") for path in ROOT.glob("*.py")}
    scripts |= {f"lab.{path.stem}": path.read_text("utf-8") for path in (ROOT / "lab").glob("*.py")}
    lines = re.search(r"^# /// script\n((?:# .*\n)*)# ///$", scripts[script[:-3]], re.M)[1].splitlines()
    python, needs = (line.removeprefix("# ").partition(" = ")[2] for line in lines)
    asked = dict(re.findall(r"^(\w+)>=(.*)$", (ROOT / "requirements.txt").read_text("utf-8"), re.M))
    seen, left = set(), {script[:-3]}
    while left:
        seen.add(name := left.pop())
        text = re.sub(r"^( *from) \.(?=\w)", r"\1 lab.", scripts[name], flags=re.M)        # within lab/
        imported = {part for full in re.findall(r"^ *(?:import|from) ([\w.]+)", text, re.M)
                    for part in (full, full.split(".")[0])}
        imported |= {f"lab.{part}" for names in re.findall(r"^ *from lab import (.*)", text, re.M)
                     for part in names.split(", ")}
        left |= (imported | (started if "runs" in imported else set())) & scripts.keys() - seen
        seen |= imported & asked.keys()
    assert python == '">=3.10"' and sorted(re.findall(r'"(.*?)"', needs)) == sorted(
        f"{name}>={asked[name]}" for name in seen & asked.keys())


EXAMPLES = [code for name in DOCUMENTS if name not in ("README.md", "docs/own_data.md")        # see test_make_idx.py
            for code in re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.M | re.S)]


def run_example(code):
    """Run an example from the documents, with few synthetic digits"""
    few = ("import os, affnist_capsnet, multimnist_capsnet\n"
           f"affnist_capsnet.N_SYNTHETIC = multimnist_capsnet.N_SYNTHETIC = {dict(train=400, val=100, test=100)}\n")
    with tempfile.TemporaryDirectory() as home:
        return run_offline(home, "-c", f"{few}os.chdir({str(ROOT)!r})\n" + code)


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_python_examples_run(code):
    done = run_example(code)
    assert done.returncode == 0, done.stderr

"""README.md: every command parses, every image it shows exists, every flag it names is real."""
import re
import shlex

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def flags_of(run_script):
    """flags_of(script) -> the flags that its --help lists; each script is asked once"""
    known = {}

    def ask(script):
        if script not in known:
            done = run_script(script, "--help")
            assert done.returncode == 0, f"{script}: {done.stderr}"
            known[script] = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", done.stdout))
        return known[script]

    return ask


def code_blocks(text):
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)
    indented = re.findall(r"(?:^(?: {4}|\t)[^\n]*\n?)+", text, re.M)
    inline = re.findall(r"`(python3 [^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join(fenced + indented + [command.replace("\n", " ") for command in inline]).replace("\\\n", " ")


def commands(text):
    """The command lines `python3 script.py ...` of all code blocks and inline code, as lists of words"""
    lines = (shlex.split(line, comments=True) for line in re.findall(r"python3 ([^\n|>&;]*)", code_blocks(text)))
    return [words for words in lines if words and not words[0].startswith("-")]


def test_every_command_parses(readme, flags_of):
    assert commands(readme)
    for script, *words in commands(readme):
        assert (ROOT / script).is_file(), f"README runs {script}, which is not there"
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in flags_of(script), f"README gives {script} the flag {word}"


def test_every_image_exists(readme):
    images = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", readme) + re.findall(r"<img[^>]*src=[\"']([^\"']+)", readme)
    assert images
    for image in images:
        assert not image.startswith("http") and (ROOT / image).is_file(), f"README shows {image}, which is not there"


def test_every_flag_named_is_real(readme, flags_of):
    prose = re.sub(r"^```.*?^```|`python3 [^`]*`", "", readme, flags=re.M | re.S)
    prose = "\n".join(line for line in prose.splitlines() if "-m pytest" not in line and "-m pip" not in line)
    scripts = {path.name for path in ROOT.glob("*.py")} | {words[0] for words in commands(readme) if "--" in "".join(words)}
    known = set().union(*map(flags_of, sorted(scripts)))
    unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", prose)) - known
    assert not unknown, f"README names flags that no script has: {sorted(unknown)}"


@pytest.mark.parametrize("text, expected", [
    ("```\npython3 a.py --x 1  # why --y\n```\n", [["a.py", "--x", "1"]]),
    ("text\n\n    python3 b.py --z \\\n      --w\n", [["b.py", "--z", "--w"]]),
    ("```sh\n$ python3 c.py > log\npython3 -m pytest\n```\nand `python3 d.py` in text", [["c.py"], ["d.py"]]),
    ("```\nfor s in 0 1; do python3 a.py --seed $s; done\n.venv/bin/python3 a.py && python3 b.py\n```", [
        ["a.py", "--seed", "$s"], ["a.py"], ["b.py"]])])
def test_commands_are_found_in_code_blocks(text, expected):
    assert commands(text) == expected


def test_the_python_example_runs(readme, run_script):
    done = run_script("-c", re.search(r"^```python\n(.*?)^```", readme, re.M | re.S)[1])
    assert done.returncode == 0 and "MNIST" in done.stderr and "[[" in done.stdout, done.stderr

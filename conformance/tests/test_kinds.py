"""The list of kinds is complete and well-formed data, and the survey in docs/conformance.md uses its names."""
import re
from pathlib import Path

from capsule_conformance import reference
from capsule_conformance.kinds import FIELDS, KINDS

CHAPTER = (Path(__file__).resolve().parents[2] / "docs/conformance.md").read_text(encoding="utf-8")


def test_every_kind_has_a_unique_name_and_all_fields():
    assert FIELDS == ("name", "description", "symptom", "finite_differences", "n_implementations")
    assert all(len(kind) == len(FIELDS) for kind in KINDS)
    names = [kind[0] for kind in KINDS]
    assert len(set(names)) == len(names)
    for name, description, symptom, finite_differences, n in KINDS:
        assert re.search(r"201[78], (Eq\. \d|Procedure 1|Section \d)|2017 run Procedure 1", description), name
        assert description and symptom, name
        assert finite_differences in ("yes", "no") or finite_differences.startswith("only where"), name
        assert 1 <= n <= (5 if name.startswith("EM: ") else 22), name


def test_finite_differences_show_stopped_gradients_only():
    assert [kind[0] for kind in KINDS if kind[3] == "yes"] == ["gradient of inner iterations stopped",
                                                              "EM: gradient of the assignments stopped"]


def test_survey_and_check_agree_on_the_same_code():
    """What the survey calls exact, the check calls right; what it calls wrong, it gives names that it has"""
    exact = CHAPTER.partition("These compute Procedure 1")[2].partition("For EM")[0]
    exact = re.findall(r"\[([\w.-]+/[\w.-]+)\]", exact)
    rows = [line.strip("| ").split(" | ") for line in CHAPTER.partition("### What the check says")[2].splitlines()
            if line.startswith("| ") and "implementation" not in line]
    said = {repository: verdict for repository, _, verdict in rows}
    known = {kind[0] for kind in KINDS} | {"no epsilon", "no epsilon, gradient"} | {
        m.name for m in (*reference.STOPS, *reference.EM_STOPS, *reference.per_position(4), *(
            m for mistakes in reference.MISTAKES.values() for m in mistakes))}
    known = {name.removeprefix("EM: ") for name in known}
    assert exact and rows
    for name in exact:
        verdict = next(verdict for repository, verdict in said.items() if repository.split(",")[0] == name)
        assert verdict.startswith("RIGHT"), name
    for repository, verdict in said.items():
        head, _, names = verdict.partition(": ")
        assert re.fullmatch(r"(VALUES )?RIGHT[A-Z ,]*|WRONG( \(a part\))?|NOT THIS PROCEDURE", head), repository
        assert all(name in known for name in names.split("; ") if name), f"{repository}: {names}"

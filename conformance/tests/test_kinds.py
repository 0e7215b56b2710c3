"""The list of kinds is complete and well-formed data."""
import re

from capsule_conformance.kinds import FIELDS, KINDS


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

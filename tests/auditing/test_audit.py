"""Audits of models whose shortcut is known in closed form, of clean ones, and of audits that were interrupted."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy.stats import binom

import vitreous
from audited import Squares, reader
from vitreous.auditing import audit as auditing
from vitreous.auditing.collected import middle_of
from vitreous.auditing.interventions import Interventions, InterventionSettings
from vitreous.auditing.report import as_csv, as_html, write_reports
from vitreous.auditing.suspicions import SuspicionSettings, find_suspicions
from vitreous.auditing.testing import Decision, judge
from vitreous.errors import RunError

METHOD = "gae"


@pytest.fixture(scope="module")
def stamped(tmp_path_factory):
    return vitreous.audit(
        reader(), Squares(), method=METHOD, out=tmp_path_factory.mktemp("audits"), threads=1, photos=12
    )


def test_the_stamp_is_found_with_the_effect_it_has(stamped):
    (finding,) = stamped.findings
    assert finding.suspicion.kind == "place"
    assert finding.suspicion.place == "lower-left corner"
    assert stamped.class_name(finding.suspicion.target) == "stamped"
    # All photos of the class have the stamp, and it alone decides: without it, or with the corner of another photo, the
    # square is read; with it, any photo is of the class. Other corners and other patches are not read at all.
    assert finding.shown_share == 1.0
    for effect in (finding.removal, finding.insertion):
        assert (effect.changed, effect.control) == (1.0, 0.0)
        assert effect.q < 0.001
        assert (effect.low, effect.high) == (1.0, 1.0)


def test_the_change_of_the_probability_is_the_one_of_the_softmax(stamped):
    (finding,) = stamped.findings
    # Logits are 20 for the stamp and at most 10 for a square: the probability falls from above 0.9999 to below 1e-4
    # where the corner is dark (-20 / 3 or less) and a square is there (5.6 or more).
    assert 0.9999 < finding.parts["replace"] <= 1
    assert 0.9999 < finding.parts["paste"] <= 1
    assert abs(finding.parts["replace_control"]) < 1e-4
    assert abs(finding.parts["paste_control"]) < 1e-4
    # Elsewhere, nothing of it is read.
    assert finding.parts["elsewhere_flip"] == 0.0


def test_what_the_corner_explains_is_no_further_finding(stamped):
    covered = [each for each in stamped.tested if each.covered_by is not None]
    assert {each.suspicion.target for each in covered} <= {0}
    assert all(stamped.tested[each.covered_by] in stamped.findings for each in covered)


def test_the_sentence_tells_what_was_done(stamped):
    text = stamped.sentence(stamped.findings[0])
    assert text.startswith("stamped: 100% of photos decided by the lower-left corner (suspected in 100%); removing")
    assert "removing it flips 100% (compared with 0%)" in text
    assert "pasting it into others makes 100% stamped (compared with 0%); p < 0.001, q < 0.001" in text


@pytest.mark.parametrize("seed", range(4))
def test_a_clean_model_has_no_finding(tmp_path, seed):
    found = vitreous.audit(
        reader(shortcut=False), Squares(60, stamped=0.0, seed=seed), method=METHOD, out=tmp_path, threads=1, photos=8
    )
    assert found.findings == []
    assert found.accuracy == pytest.approx(2 / 3)  # of class 0 none can be right


def test_the_object_is_no_finding_with_masks(tmp_path):
    found = vitreous.audit(
        reader(shortcut=False), Squares(60, stamped=0.0, masks=True), method=METHOD, out=tmp_path, threads=1, photos=8
    )
    assert found.findings == []
    assert found.collected.masked.all()
    inside = found.collected.objects.sum(axis=1)
    np.testing.assert_array_equal(inside, 4)  # a square is four patches exactly


def test_the_background_is_found_with_masks(tmp_path):
    found = vitreous.audit(reader(), Squares(masks=True), method=METHOD, out=tmp_path, threads=1, photos=8)
    about = [each for each in found.tested if each.suspicion.kind == "background" and each.suspicion.target == 0]
    assert len(about) == 1
    assert about[0].insertion.changed == 1.0  # the stamp is in the background of every host
    assert about[0].insertion.control == 0.0


def test_a_stamp_in_half_of_the_photos(tmp_path):
    found = vitreous.audit(reader(), Squares(120, stamped=0.5), method=METHOD, out=tmp_path, threads=1, photos=8)
    # Photos without a stamp are read as their square, so every photo of the predicted class has one.
    assert [each.suspicion.place for each in found.findings] == ["lower-left corner"]


def test_what_does_not_go_with_the_labels_is_an_observation(tmp_path):
    """The model reads the stamp, but photos of all labels have it: nobody could learn a class from it."""
    data = Squares(120, stamped=0.5, everywhere=True)
    found = vitreous.audit(reader(), data, method=METHOD, out=tmp_path, threads=1, photos=8)
    assert found.findings == []
    (corner,) = [each for each in found.observations if each.suspicion.place == "lower-left corner"]
    assert (corner.insertion.changed, corner.insertion.control) == (1.0, 0.0)
    assert corner.label_q > 0.05
    assert "it does not go with the label stamped here" in found.sentence(corner)
    assert found.exceeded({"findings": 0.0}) == []
    # Labels of another list of classes say nothing about it: then it is a finding, as without labels.
    for labels in (found.collected.label + 150, np.full(120, -1)):
        known = replace(found.collected, label=labels)
        assert known.labelled(0) is None
        suspicions, _ = find_suspicions(known, SuspicionSettings())
        measured = [Interventions(found.context, known, InterventionSettings(photos=8)).test(one) for one in suspicions]
        judged = judge(suspicions, measured, known, Decision(), 0)
        assert [each.suspicion.place for each in judged if each.finding and each.is_shortcut and not each.covered_by][
            :1
        ] == ["lower-left corner"]


def test_a_colour_cast_is_found_with_the_effect_it_has(tmp_path):
    data = Squares(60, stamped=0.0, red=2.5)
    found = vitreous.audit(reader(red=True), data, method=METHOD, out=tmp_path, threads=1, photos=24)
    assert found.accuracy == 1.0
    (cast,) = [each for each in found.findings if each.suspicion.kind == "colour" and each.suspicion.target == 0]
    # The median photo has 2.5 times the red of other classes; rounding to bytes and few photos move it a little.
    assert cast.suspicion.gains == pytest.approx((2.5, 1.0, 1.0), rel=0.15)
    # Red alone decides, so every photo loses the class without it, and every other photo gets it.
    assert cast.removal.changed == cast.insertion.changed == 1.0
    assert cast.insertion.control < 0.7  # a change as strong in a random direction adds red in less than half of all
    assert (cast.removal.n, cast.insertion.n) == (20, 24)  # all of the class, and more others


def test_patches_come_from_any_photo_of_the_class(stamped):
    """Not from those that were selected for their maps."""
    about = [each for each in stamped.tested if each.insertion is not None and each.suspicion.kind == "place"]
    assert about
    assert {each.insertion.n for each in about} == {12}


def test_the_power_is_that_of_the_binomial_distribution(stamped):
    told = stamped.as_json()["power"]
    assert [each["photos"] for each in told] == [30, 30, 30]
    for each in told:
        enough = [binom.sf(6 - 1, 30, each["share"] - below) for below in (0.0, 0.01)]
        assert enough[0] >= 0.8 > enough[1]


def test_labels_of_another_list_of_classes_are_not_compared(stamped):
    labels = stamped.collected.label
    assert stamped.accuracy == 1.0
    other = replace(stamped, collected=replace(stamped.collected, label=labels + 150))
    assert other.accuracy is None


def test_the_middle_of_a_grid():
    assert middle_of((6, 6)).reshape(6, 6).sum() == 16
    assert middle_of((14, 14)).reshape(14, 14)[:, 7].sum() == 10


def test_reports(stamped, tmp_path):
    files = write_reports(stamped, tmp_path, examples=2)
    page = files["html"].read_text()
    assert "decided by the lower-left corner" in page
    assert stamped.fingerprint in page
    assert page.count("data:image/jpeg") == 2
    assert "http://" not in page
    assert "https://" not in page
    told = json.loads(files["json"].read_text())
    assert told["findings"][0]["place"] == "lower-left corner"
    examples = told["findings"][0]["examples"]
    assert [sorted(each) for each in examples] == [["photo", "picture", "probability"]] * 2
    assert all(each["photo"] in told["findings"][0]["photos"] for each in examples)
    assert [Image.open(tmp_path / each["picture"]).format for each in examples] == ["JPEG"] * 2
    assert as_html(told, tmp_path) == page  # a view of the JSON file and its pictures, of nothing else
    assert told["findings"][0]["removal"]["changed"] == 1.0
    assert told["examined"]["photos"] == 90
    assert told["examined"]["weights"] == stamped.run.weights
    rows = list(csv.DictReader(files["csv"].open()))
    assert rows[0]["result"] == "finding"
    assert float(rows[0]["excess"]) == 1.0
    assert len(rows) >= len(stamped.tested)
    assert files["csv"].read_text() == as_csv(stamped)


def test_the_same_call_gives_the_same_audit(stamped):
    again = vitreous.audit(reader(), Squares(), method=METHOD, out=stamped.store.folder.parent, threads=1, photos=12)
    assert again.fingerprint == stamped.fingerprint
    assert [each.suspicion.key for each in again.tested] == [each.suspicion.key for each in stamped.tested]
    assert as_csv(again) == as_csv(stamped)


class Killed(BaseException):
    """Stands for the end of the process."""


def test_killed_between_maps_and_between_tests_it_goes_on(stamped, tmp_path, monkeypatch):
    data = Squares()
    load, loaded = data.load, []

    def dying(index):
        loaded.append(index)
        if len(loaded) > 40:
            raise Killed
        return load(index)

    monkeypatch.setattr(data, "load", dying)
    options = {"method": METHOD, "out": tmp_path, "threads": 1, "photos": 12}
    with pytest.raises(Killed):
        vitreous.audit(reader(), data, **options)
    monkeypatch.setattr(data, "load", load)
    test, tested = Interventions.test, []

    def dying_test(self, suspicion):
        tested.append(suspicion.key)
        if len(tested) == 3:
            raise Killed
        return test(self, suspicion)

    monkeypatch.setattr(Interventions, "test", dying_test)
    with pytest.raises(Killed):
        vitreous.audit(reader(), data, **options)
    found = vitreous.audit(reader(), data, **options)
    # The two tests that were finished are read, the third is made again.
    assert tested[2] == tested[3]
    assert len(tested) == len(set(tested)) + 1
    assert as_csv(found) == as_csv(stamped)


def test_a_damaged_test_is_made_again(tmp_path):
    options = {"method": METHOD, "out": tmp_path, "threads": 1, "photos": 8}
    found = vitreous.audit(reader(), Squares(45), **options)
    for file in (found.store.folder / "tests").iterdir():
        file.write_text("{")
    again = vitreous.audit(reader(), Squares(45), **options)
    assert as_csv(again) == as_csv(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must lie between 0 and 1"),
        ({"effect": 2.0}, "effect must lie between 0 and 1"),
        ({"photos": 1}, "at least 2 photos"),
        ({"method": "gradient-methods"}, "one method"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(RunError, match=message):
        vitreous.audit(reader(), Squares(6), out=tmp_path, **{"method": METHOD, **options})


def test_a_set_of_broken_photos(tmp_path, monkeypatch):
    data = Squares(6)

    def broken(index):
        raise OSError("the disk is gone")

    monkeypatch.setattr(data, "load", broken)
    with pytest.raises(RunError, match=r"no photo of .* could be explained: the disk is gone"):
        vitreous.audit(reader(), data, out=tmp_path, method=METHOD, threads=1)


def test_too_few_photos_are_examined_without_a_suspicion(tmp_path):
    found = vitreous.audit(reader(), Squares(9), out=tmp_path, method=METHOD, threads=1)
    assert (found.findings, found.tested) == ([], ())
    page = write_reports(found)["html"].read_text()
    assert "No finding, and none was possible: every class has too few photos" in page


def test_limits(stamped):
    assert auditing.parse_limits(["findings", "removed=0.5"]) == {"findings": 0.0, "removed": 0.5}
    assert stamped.exceeded({"findings": 0.0, "removed": 0.5}) == ["findings 1 > 0", "removed 1 > 0.5"]
    assert stamped.exceeded({"findings": 1.0, "pasted": 1.0}) == []
    # 30 of 90 photos are of the class, and all of them are decided by the stamp.
    assert stamped.exceeded({"decided": 0.33}) == ["decided 0.3333 > 0.33"]
    with pytest.raises(RunError, match="takes findings"):
        auditing.parse_limits(["everything=1"])
    with pytest.raises(RunError, match="needs a number"):
        auditing.parse_limits(["removed=much"])

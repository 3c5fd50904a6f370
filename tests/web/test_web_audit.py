"""The audit tab, without a browser: what ``vitreous audit`` has written is listed with its examples."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gradio", reason="the web page needs Gradio (extra vitreous[web])")
pytest.importorskip("sklearn", reason="an audit needs scikit-learn (extra vitreous[audit])")

from starlette.applications import Starlette
from starlette.testclient import TestClient

import vitreous
from audited import Squares, reader
from vitreous.auditing.report import read_examples, write_reports
from vitreous.errors import InputError
from vitreous.web.audit_tab import HOW, audit_html, find_audits, report_routes
from vitreous.web.security import is_allowed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An audit of a model that reads a stamp."""
    out = tmp_path_factory.mktemp("audits")
    found = vitreous.audit(reader(), Squares(45), method="gae", out=out, threads=1, photos=6)
    write_reports(found, examples=3)
    return out


def test_findings_are_listed_with_effects_and_examples(folder):
    (audit,) = find_audits(folder)
    assert find_audits(audit.folder) == [audit]  # the folder of one audit, or that of several
    (row,) = audit.content["findings"]
    page = audit_html(audit, 0, "findings", None)
    assert "1 finding: the model relies on something besides the object" in page
    assert row["sentence"].replace("<", "&lt;") in page
    assert f"{100 * row['removal']['changed']:.0f}%" in page
    pictures = list(read_examples(row, audit.folder))
    assert len(pictures) == 3
    assert all(source.startswith("data:image/jpeg;base64,") and "photo-0" in caption for source, caption in pictures)
    assert all(source in page for source, _ in pictures)
    report = audit.page.read_text("utf-8")  # the same data, seen as a report
    assert all(source in report and caption in report for source, caption in pictures)


def test_pictures_of_examples_are_read_from_the_audit_alone(folder, tmp_path):
    (audit,) = find_audits(folder)
    (row,) = audit.content["findings"]
    outside = tmp_path / "secret.jpg"
    outside.write_bytes((audit.folder / row["examples"][0]["picture"]).read_bytes())
    for name in (str(outside), "../secret.jpg", "audit-examples/../../secret.jpg", "audit-examples/missing.jpg"):
        changed = {**row, "examples": [{**row["examples"][0], "picture": name}]}
        assert list(read_examples(changed, audit.folder)) == []
    assert list(read_examples({}, audit.folder)) == []  # written by an earlier version


def test_lists_are_filtered_by_class(folder):
    (audit,) = find_audits(folder)
    rejected = audit.content["not confirmed"]
    names = audit.class_names("not confirmed")
    assert names == sorted({row["class name"] for row in rejected})
    assert audit_html(audit, 0, "not confirmed", "all classes").count("<article") == len(rejected)
    for name in names:
        count = sum(row["class name"] == name for row in rejected)
        assert audit_html(audit, 0, "not confirmed", name).count("<article") == count
    assert "Nothing in this list." in audit_html(audit, 0, "findings", "no such class")


def test_the_report_is_served_and_no_other_file(folder):
    audits = find_audits(folder)
    with TestClient(Starlette(routes=report_routes(audits))) as client:
        assert client.get("/audit/0").text == audits[0].page.read_text("utf-8")
        for path in ("/audit/1", "/audit/-1", "/audit/audit.json", "/audit/0/../audit.json"):
            assert client.get(path).status_code == 404
    assert is_allowed("/audit/0")
    assert not any(map(is_allowed, ("/audit", "/audit/", "/audit/x", "/audit/0/x")))


def test_names_of_an_audit_are_never_markup(folder, tmp_path):
    (audit,) = find_audits(folder)
    told = json.loads((audit.folder / "audit.json").read_text())
    told["findings"][0] |= {"sentence": "<script>1</script>", "class name": "<i>"}
    told["examined"]["data"] = "<b>data</b>"
    (tmp_path / "audit.json").write_text(json.dumps(told))
    page = audit_html(find_audits(tmp_path)[0], 0, "findings", None)
    assert not any(mark in page for mark in ("<script", "<i>", "<b>data", "audit/0"))  # and no report is beside it


def test_a_folder_without_an_audit_is_refused_with_the_command(tmp_path):
    (tmp_path / "one").mkdir()
    for content in ("{", '{"format": "another"}', "[]"):
        (tmp_path / "one" / "audit.json").write_text(content)
        with pytest.raises(InputError, match="holds no audit: make one with `vitreous audit MODEL DATA --out"):
            find_audits(tmp_path)
    assert "vitreous serve --audit" in HOW

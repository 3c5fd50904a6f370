"""Methods tagged by what their authors say about patents."""

import vitreous
from vitreous.methods.spelling import patent_of

LRP = {"abslrp", "attnlrp", "attnlrp_gamma", "conservative_lrp", "lrp", "lrp_rollout", "plrp", "transattr"}


def names(**options):
    return {info.name for info in vitreous.list_methods(**options)}


def test_what_propagates_by_rules_of_lrp_is_left_out():
    assert names() - names(patents=False) >= LRP
    assert {info.name for info in vitreous.list_methods() if info.family == "relevance"}.isdisjoint(
        names(patents=False)
    )


def test_others_stay():
    assert {"tokentm", "gradtoken", "decompx", "gae", "gradcam", "integrated_gradients", "rise"} <= names(patents=False)


def test_a_statement_has_its_sources():
    tagged = [info for info in vitreous.list_methods() if info.patent is not None]
    assert all(info.patent.statement and info.patent.sources for info in tagged)


def test_options_that_choose_such_rules_count_as_well():
    assert patent_of("ixg") is None
    assert patent_of("ixg:rule=attnlrp") is not None
    assert patent_of("ixg:rule=libra") is None


def test_a_method_may_declare_it(registry):
    from vitreous.methods import Patent, register
    from vitreous.methods.gradient import InputGradient

    @register(
        "claimed",
        family="plugin",
        paper="Nobody, Nothing",
        year=2026,
        class_specific=True,
        signed=True,
        patent=Patent("Its author says so.", ("a page",)),
    )
    def claimed():
        """A method."""
        return InputGradient()

    assert "claimed" in names() - names(patents=False)

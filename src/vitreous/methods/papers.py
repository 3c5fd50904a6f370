"""Where the papers of the methods can be read."""

from __future__ import annotations

from urllib.parse import quote_plus

from vitreous.methods.registry import MethodInfo

_ARXIV = {
    "raw_attention": "2104.14294",
    "rollout": "2005.00928",
    "attcam": "2012.09838",
    "gae": "2103.15679",
    "gradsam": "2204.11073",
    "agcam": "2402.04563",
    "legrad": "2404.03214",
    "tokentm": "2403.14552",
    "gradient": "1312.6034",
    "ixg": "1704.02685",
    "fullgrad": "1905.00780",
    "integrated_gradients": "1703.01365",
    "smoothgrad": "1706.03825",
    "gradcam": "1610.02391",
    "gradcampp": "1710.11063",
    "xgradcam": "2008.02312",
    "hirescam": "2011.08891",
    "eigencam": "2008.00299",
    "scorecam": "1910.01279",
    "vit_recipro_cam": "2310.02588",
    "conservative_lrp": "2202.07304",
    "attnlrp": "2402.05602",
    "transattr": "2012.09838",
    "lrp_rollout": "2012.09838",
    "plrp": "1905.09418",
    "abslrp": "2412.09311",
    "attin": "2004.10102",
    "attin_residual": "2109.07152",
    "globenc": "2205.03286",
    "alti": "2203.04212",
    "decompx": "2306.02873",
    "occlusion": "1311.2901",
    "pami": "2302.03318",
    "atman": "2301.08110",
    "rise": "1806.07421",
    "hsic": "2206.06219",
    "lime": "1602.04938",
    "kernel_shap": "1705.07874",
    "vitcx": "2211.03064",
}
_ELSEWHERE = {
    "gradtoken": "https://doi.org/10.1016/j.neunet.2024.106837",
    "iia": "https://yonisgit.github.io/iterated-integrated-attributions/",
    "tam": "https://openreview.net/forum?id=TT-cf6QSDaQ",
    "bi_token": "https://openreview.net/forum?id=rm0zIzlhcX",
    "bi_head": "https://openreview.net/forum?id=rm0zIzlhcX",
    "layercam": "https://doi.org/10.1109/TIP.2021.3089943",
    "gradcam_elementwise": "https://github.com/jacobgil/pytorch-grad-cam",
    "lrp": "https://doi.org/10.1371/journal.pone.0130140",
}


def paper_link(info: MethodInfo) -> str:
    """Give the address of a method's paper, or of a search for its title where no address is known."""
    if info.name in _ARXIV:
        return f"https://arxiv.org/abs/{_ARXIV[info.name]}"
    return _ELSEWHERE.get(info.name) or f"https://scholar.google.com/scholar?q={quote_plus(info.paper)}"

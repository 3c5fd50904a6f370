"""All protocols, paper by paper, and ``find_protocol``: a new protocol is one more entry of ``_ALL``."""

from __future__ import annotations

from collections.abc import Mapping

from vitreous._utils.messages import close_match
from vitreous.errors import ProtocolError
from vitreous.evaluation.protocol import Protocol, Sweep
from vitreous.evaluation.tasks.faithfulness import (
    Completeness,
    EfficientRandomisation,
    FillingCurves,
    GroupFaithfulness,
    RandomLogit,
    Road,
    ShiftStability,
    SingleDeletion,
)
from vitreous.evaluation.tasks.patch_masking import ContrastDropping, InfluenceDeletion, InsertionDeletion, KeepMaps
from vitreous.evaluation.tasks.pixel_masking import AreaBetweenCurves, ErasingAccuracy, ErasingProbability
from vitreous.evaluation.tasks.sanity import Concentration, Faithfulness, Randomisation, Sensitivity
from vitreous.evaluation.tasks.segmentation import (
    AveragePrecision,
    ClassSegmentation,
    GridPointing,
    Localisation,
    Segmentation,
    ThresholdSearch,
)
from vitreous.evaluation.tasks.word_masking import Erasure, Rationales, WordErasing

__all__ = ["PROTOCOLS", "Protocol", "find_protocol", "list_protocols"]


_ERASER = "DeYoung et al., ERASER, ACL 2020; Cheng et al., GradToken, Neural Networks 2025"
_CHEFER = "Chefer et al., Transformer Interpretability Beyond Attention Visualization, CVPR 2021"
_TOKENTM = "Wu et al., Token Transformation Matters, CVPR 2024"
_GRADTOKEN = "Cheng et al., GradToken, Neural Networks 2025"
_HALVES = "Halves go by the hash of a photo's name; where a few photos are all in one, there is no held-out number."
_PROPAGATIONS = ("rollout_elementwise", "rollout_matrix", "average_elementwise", "average_matrix")
_SKIPPLUS = "SkipPLUS: Skip the First Few Layers to Better Explain Vision Transformers, CVPR Workshops 2024"
_BINARY = "One logit z (MURA) counts as two classes, -z and z with their sigmoids, so the target is the label."
_RATIONALES = (
    "Texts are truncated to the model's maximum length, and their rationales with them.",
    "A text without any rationale word in that part does not count for token-F1; n is the number of texts that do.",
    "Words are separated by white space; words without a piece of the tokenizer are ignored.",
    "k is a number of words, not a share, so the best possible token-F1 depends on the length of the rationale.",
    "Scores below 0 are taken as 0, so a method with fewer than k words for the class is filled up from the beginning.",
)

_GRID = "Böhle et al., Convolutional Dynamic Alignment Networks for Interpretable Classifications, CVPR 2021"
_FOCUS = "Arias-Duart et al., Focus! Rating XAI Methods and Finding Biases, FUZZ-IEEE 2022"
_ROAD = "Rong et al., A Consistent and Efficient Evaluation Strategy for Attribution Methods, ICML 2022"

_ALL = (
    Protocol(
        name="chefer-2021-segmentation",
        title="Foreground segmentation by the map of the predicted class, thresholded at its mean",
        paper=_CHEFER,
        version=1,
        tasks=(Segmentation(),),
    ),
    Protocol(
        name="chefer-2021-perturbation",
        title="Accuracy while pixels are erased, most or least relevant first, for the predicted and the true class",
        paper=_CHEFER,
        version=1,
        tasks=(ErasingAccuracy(),),
        notes=(
            "The program prints accuracies and leaves the area to the reader, so both conventions are given.",
            "The trapezoid goes over the ratio from 0 to 0.9 with the unperturbed photo, so 90 is the most.",
        ),
    ),
    Protocol(
        name="tokentm-probability",
        title="AOPC and LOdds: the fall of the predicted class's probability while the most relevant pixels are erased",
        paper=_TOKENTM,
        version=1,
        tasks=(ErasingProbability(),),
        notes=(
            "Steps, filling and order of pixels are those of chefer-2021-perturbation.",
            "AOPC averages p0 - pk; AttCAT's program averages its absolute value.",
            "LOdds is log(pk / p0); SkipPLUS' program logs the inverse, the opposite sign.",
        ),
    ),
    Protocol(
        name="tokentm-ablation",
        title="TokenTM without its parts, and over a part of the blocks, in segmentation and perturbation",
        paper=_TOKENTM,
        version=1,
        tasks=(Segmentation(), ErasingAccuracy(), ErasingProbability()),
        methods=(
            "tokentm:components=baseline",
            "tokentm:components=af",
            "tokentm:components=af_l",
            "tokentm",
            "tokentm:necc=rescaled",
        ),
        sweeps=(Sweep("tokentm.rollout:depth={number}", "quarters"),),
        notes=(
            "The paper's rows: baseline, + AF, + AF + L, + AF + L + NECC, and aggregation over the first blocks only.",
            "The first quarter, half, three quarters and all of the blocks are 3, 6, 9 and 12 of twelve.",
            "necc=rescaled multiplies NECC by the number of tokens, to show what its order of 1/n costs.",
            "Images without a mask have no segmentation metrics, images without a label no accuracy.",
        ),
    ),
    Protocol(
        name="gradtoken-segmentation",
        title="Foreground segmentation at the best of ten thresholds, and at one that was chosen on other photos",
        paper=_GRADTOKEN,
        version=1,
        tasks=(ThresholdSearch(),),
        notes=(
            "The paper searches the threshold on the same photos that it reports; the held-out one is what others get.",
            "One threshold serves all metrics of a method: the one with the highest mIoU.",
            _HALVES,
        ),
    ),
    Protocol(
        name="gradtoken-voc",
        title="Segmentation of several classes: every pixel gets the class whose map is highest there",
        paper=_GRADTOKEN,
        version=1,
        tasks=(ClassSegmentation(),),
        notes=(
            "The explained classes are those of the image's mask, whatever the model predicts.",
            "Maps are scaled one by one before they are compared, because scores of classes have no common scale.",
            "A model with 20 outputs has the classes of VOC in their order; one with 21 has background as output 0.",
            _HALVES,
        ),
    ),
    Protocol(
        name="gradtoken-ablation",
        title="GradToken's ways to propagate, to integrate heads, and how deep it propagates",
        paper=_GRADTOKEN,
        version=1,
        tasks=(Segmentation(), ThresholdSearch(), ErasingAccuracy()),
        methods=(
            *(
                f"gradtoken:propagation={propagation},heads={heads}"
                for propagation in ("none", *_PROPAGATIONS)
                for heads in ("average", "relu_average")
            ),
        ),
        sweeps=(Sweep("gradtoken:depth={number}", "blocks"),),
        notes=(
            "The rows are the paper's variants 0 to 4, each with i (heads averaged) and ii (ReLU, then averaged).",
            "gradtoken:depth=n propagates through the n blocks below the last one (Fig. 11).",
            "Images without a mask have no segmentation metrics, images without a label no accuracy.",
            _HALVES,
        ),
    ),
    Protocol(
        name="skipplus-faithfulness",
        title="Insertion and deletion of patches with True Token Masking, for the true class",
        paper=_SKIPPLUS,
        version=1,
        tasks=(InsertionDeletion(),),
        resize="model",
        notes=(
            "The trapezoid goes over ratios from 0 to 0.9 or from 0.1 to 1, so 90 is the most before 100 - x is taken.",
            _BINARY,
        ),
    ),
    Protocol(
        name="skipplus-layers",
        title="The same for every layer that PLUS may start at (Fig. 7)",
        paper=_SKIPPLUS,
        version=1,
        tasks=(InsertionDeletion(),),
        resize="model",
        start_layers=True,
        notes=(
            "Every method is run as .plus with start=0 to the last layer, whatever its aggregation.",
            _BINARY,
        ),
    ),
    Protocol(
        name="skipplus-segmentation",
        title="Average precision of the map of the class with the largest area, averaged over photos",
        paper=_SKIPPLUS,
        version=1,
        tasks=(AveragePrecision(),),
        resize="model",
        notes=(
            "The foreground is all objects of the explained class.",
            "Where a mask does not name classes, the photo's label is explained and all objects are foreground.",
            "The mask is resized and cropped as the photo is; what a crop adds outside of it does not count.",
        ),
    ),
    Protocol(
        name="libra-mif",
        title="How often the model keeps its answer while the most or the least influential patches are dropped",
        paper="LibraGrad: Balancing Gradient Flow for Universally Better Vision Transformer Attributions, CVPR 2025",
        version=1,
        tasks=(InfluenceDeletion(),),
        resize="model",
        notes=(
            "Accuracy is against the class that the model predicts of the whole photo, so no label is needed.",
            "MIF and LIF are areas under that accuracy; for MIF lower is better, for LIF higher.",
        ),
    ),
    Protocol(
        name="agcam-perturbation",
        title="Area between the probabilities with the least and with the most relevant pixels erased first (ABPC)",
        paper="Leem and Seo, Attention Guided CAM, AAAI 2024",
        version=1,
        tasks=(AreaBetweenCurves(),),
        notes=("Erased pixels are 0 after normalisation, and all eleven points from 0% to 100% count equally.",),
    ),
    Protocol(
        name="sanity",
        title="Model randomisation, max-sensitivity, sparseness, complexity and faithfulness correlation",
        paper="Adebayo et al. 2018; Yeh et al. 2019; Chalasani et al. 2020; Bhatt et al. 2020",
        version=1,
        tasks=(Randomisation(), Sensitivity(), Concentration(), Faithfulness()),
        resize="model",
        notes=(
            "Weights are randomised on a copy of the model, which itself is never changed.",
            "A stage of the cascade is named by what is random: the head, the upper blocks, all blocks, everything.",
            "A method whose map hardly changes (rank correlation near 1) does not show what the model has learned.",
        ),
    ),
    Protocol(
        name="localisation",
        title="Pointing game, energy in the mask and rank accuracy of the map of the predicted class",
        paper="Zhang et al. 2016; Wang et al. 2020; Arras et al. 2022",
        version=1,
        tasks=(Localisation(),),
    ),
    *(
        Protocol(
            name=f"grid-pointing-{cells}x{cells}",
            title=f"Grid pointing game: the share of positive scores in the class's cell of a {cells} x {cells} mosaic",
            paper=_GRID,
            version=1,
            tasks=(GridPointing(),),
            mosaic=cells,
            notes=(
                "Every photo with a label is explained once, in a mosaic with photos of other classes around it.",
                "Which photos these are, and the cells, depend on the photo's name alone.",
                "The mosaic has the model's input size, so that positions are those that the model knows.",
                f"A constant map has 1/{cells**2} in each cell, and so has a map that does not depend on the class.",
                "Photos that the model does not know are not left out, as the authors leave out unsure ones.",
            ),
        )
        for cells in (2, 3)
    ),
    *(
        Protocol(
            name=f"prompt-pointing-{classes}-classes",
            title=f"The share of positive scores in the cells of the class that a prompt names, {classes} classes in a "
            "2 x 2 mosaic",
            paper=paper,
            version=1,
            tasks=(GridPointing(),),
            mosaic=2,
            mosaic_classes=None if classes == 4 else classes,
            prompt="a photo of a {}.",
            notes=(
                "The model is a dual encoder (demo-clip, CLIP, SigLIP); the class names come from the data set.",
                "What is explained is logit scale x cosine of the image and the prompt, as the target Prompt does.",
                "If a class has several names, separated by commas, the first is used; underscores become blanks.",
                "The images of a mosaic and their cells depend on the name of the image alone.",
                f"A constant map has 1/{classes} in the cells of a class, and so has one that ignores the prompt.",
            ),
        )
        for classes, paper in ((2, _FOCUS), (4, _GRID))
    ),
    Protocol(
        name="contrast-dropping",
        title="Whether dropping the patches that favour the predicted class over the next changes f_A - f_B",
        paper="Zhang et al., Finer-CAM: Spotting the Difference Reveals Finer Details, CVPR 2025",
        version=1,
        tasks=(ContrastDropping(),),
        resize="model",
        notes=(
            "A is the predicted class, B the next likely; both are those of the whole photo at every step.",
            "Areas are of differences of the model's outputs, logits as a rule, and have no upper end.",
            "A gain is the area between the curves by the map of the contrast and by the map of class A.",
            "Above 0 the contrast finds more of the difference; a map that does not depend on the target has 0.",
            "Patches are dropped behind the positional embedding, as in skipplus-faithfulness.",
        ),
    ),
    Protocol(
        name="saco",
        title="SaCo: whether groups of more salient pixels change the prediction more, for all pairs of ten groups",
        paper="Wu et al., On the Faithfulness of Vision Transformer Explanations, CVPR 2024",
        version=1,
        tasks=(GroupFaithfulness(),),
        notes=("The pixels of one group become the image's mean colour; all others stay.",),
    ),
    Protocol(
        name="road",
        title="ROAD: the predicted class's probability while pixels are imputed from their surroundings, MoRF and LeRF",
        paper=_ROAD,
        version=1,
        tasks=(Road(),),
        notes=(
            "Imputed pixels solve the authors' linear equations; the noise has their standard deviation of 0.01.",
            "The noise is drawn once for an image and is the same for all methods and steps.",
            "Points are averaged; the unperturbed photo is not among them.",
        ),
    ),
    Protocol(
        name="fillings",
        title="The same curves with pixels black, mean, blurred or imputed, and with patches dropped",
        paper=_ROAD,
        version=1,
        tasks=(FillingCurves(),),
        notes=(
            "Every column is one filling: half of the difference between LeRF and MoRF, averaged over five steps.",
            "The report shows how similarly two fillings rank the methods.",
            "The last column is empty for models from which patches cannot be dropped.",
        ),
    ),
    Protocol(
        name="single-deletion",
        title="Rank correlation of the scores of 16 cells with the fall of the logit when each alone is erased",
        paper="Hesse et al., Benchmarking the Attribution Quality of Vision Models, NeurIPS 2024",
        version=1,
        tasks=(SingleDeletion(),),
        notes=("The authors fine-tune their models on deleted cells; the model is taken as it is here.",),
    ),
    Protocol(
        name="completeness",
        title="How far the sum of a map is from the logit that it explains",
        paper="Sundararajan et al. 2017; Mehri et al., LibraGrad, CVPR 2025",
        version=1,
        tasks=(Completeness(),),
        resize="model",
        notes=(
            "Only the scores of patches are summed: what class token, registers and biases carry counts as missing.",
            "Only maps in units of the logit can be complete; attention weights are not.",
        ),
    ),
    Protocol(
        name="random-logit",
        title="Rank correlation of the map of the predicted class with that of a random other class",
        paper="Sixt et al., When Explanations Lie, ICML 2020",
        version=1,
        tasks=(RandomLogit(),),
        resize="model",
        notes=("A method whose map is the same for every class (correlation 1) does not explain the class.",),
    ),
    Protocol(
        name="efficient-randomisation",
        title="eMPRT: the relative rise of the map's complexity when all weights are random",
        paper="Hedström et al., Sanity Checks Revisited, XAI in Action at NeurIPS 2023",
        version=1,
        tasks=(EfficientRandomisation(),),
        resize="model",
    ),
    Protocol(
        name="shift-stability",
        title="Rank correlation of the map with those of the same photo shifted by one and by four pixels",
        paper="Yeh et al. 2019, with shifts instead of noise",
        version=1,
        tasks=(ShiftStability(),),
        resize="model",
    ),
    Protocol(
        name="eraser-movies",
        title="Token-F1 against human rationales, AOPC and LOdds with words removed and masked, comprehensiveness and "
        "sufficiency",
        paper=_ERASER,
        version=1,
        tasks=(Rationales(), WordErasing(), Erasure()),
        notes=(
            *_RATIONALES,
            "Token-F1 explains the true class, as GradToken does; all else the predicted one, as ERASER does.",
            "AOPC averages p0 - pk and LOdds log(pk / p0) over the steps, as for pixels.",
            "The steps of AOPC and LOdds, 10 to 90% of the words, are those for pixels; GradToken has none for texts.",
        ),
    ),
    Protocol(
        name="eraser-movies-rationales",
        title="Token-F1 against human rationales alone, which needs no run of the model beyond the explanation",
        paper=_ERASER,
        version=1,
        tasks=(Rationales(),),
        notes=(*_RATIONALES, "The class that is explained is the true one, as GradToken does."),
    ),
)

PROTOCOLS: Mapping[str, Protocol] = {protocol.name: protocol for protocol in _ALL}

# What ``audit`` keeps of every image. It measures nothing, so it is found by name, as workers do, but not listed.
AUDIT_MAPS = Protocol(
    name="audit-maps",
    title="Maps of the predicted class, tokens at their peaks and colours, for an audit",
    paper="",
    version=2,
    tasks=(KeepMaps(),),
    resize="model",
)


def find_protocol(name: str) -> Protocol:
    """The protocol of that name.

    Raises:
        ProtocolError: there is none.
    """
    if name == AUDIT_MAPS.name:
        return AUDIT_MAPS
    if name not in PROTOCOLS:
        raise ProtocolError(
            f"there is no protocol {name!r}{close_match(name, PROTOCOLS)}; there are {', '.join(PROTOCOLS)}"
        )
    return PROTOCOLS[name]


def list_protocols() -> list[Protocol]:
    """All protocols, paper by paper."""
    return list(PROTOCOLS.values())

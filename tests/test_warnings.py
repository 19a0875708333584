"""The warnings of the package: all of them, and what each tells to do."""

import ast
import warnings
from pathlib import Path

import pyro_sparsegp
from pyro_sparsegp.warned import Warned, warn_once

# Some words of each text, and its end.
WARNINGS = {
    "This is few, and intervals of the hyperparameters": "integrate is for up to some 8.",
    "depends on which other rows": "instead of BatchNorm take LayerNorm, or call network.eval().",
    "All further steps are plain ones": "All further steps are plain ones.",
    "inductor's code gives other numbers": "Steps are replayed without it.",
    "changes by": "or take more nodes, TraceQuadrature_ELBO(num_nodes=200).",
    "by a hyperparameter, which its family does not follow": "or take SVGP(64).",
    "did not settle": "take a family with a free posterior, such as SVGP.",
    "did not converge": "Absorb fewer rows at a time.",
    "dropped sites of negative precision": "lower damping (0.1) and power (0.5) help.",
    "enter densities by their sum": "or give sites of one output one posterior, {({}): SVGP(64)}.",
    "has a value for each datum": "or use quadrature in pyro.factor.",
    "in another way than at the guide's first call": "for a kink beside a latent give independent=True.",
    "is one Gaussian with a full covariance": "Give independent=True to keep families here.",
    "enter the same densities, and the guide treats them": "Reason: {}",
    "has a variance correction relative to the training inputs": "before or after training.",
    "is made of values of GP site": "plus the values of a GP site of mean 0.",
    "is drawn from the model, not as it was learned": "and leave the latent in its own.",
    "is independent noise at each row": "effects of single rows into a plate of latents.",
    "is neither a latent site that the guide knows": "load it into a guide of that model.",
    "meet in densities of more than": "Take more particles, num_particles=10.",
    "needed a relative jitter": "or set jitter=.",
    "no plate scales them up": "poutine.scale does not do it: it weighs rows.",
    "was not found (": "or give init_loc_fn a start nearer to the mode.",
    "were changed in place after training": "or change copies.",
    "is not far above the jitter": "jitter=1e-12) in float64, or more noise.",
}

NAMES = ("warn", "warn_once")


def text_of(node: ast.expr) -> str:
    """A string as it is written, with {} for what is filled in; of a choice, the longer."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return max(text_of(node.body), text_of(node.orelse), key=len)
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def test_each_warning_ends_in_what_to_do():
    texts = []
    for path in Path(pyro_sparsegp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in NAMES:
                texts.append(max(map(text_of, node.args), key=len))
    # A text that is passed on is listed where it is written.
    texts = [text for text in texts if text != "{}"]
    for start, end in WARNINGS.items():
        (text,) = [text for text in texts if start in text]
        assert text.endswith(end), text
    assert len(texts) == len(WARNINGS), [text for text in texts if not any(start in text for start in WARNINGS)]


def test_one_warning_does_not_silence_another_of_the_same_site():
    warned: Warned = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in ("one", "other", "one"):
            warn_once(warned, kind, "f", kind)
    assert [str(warning.message) for warning in caught] == ["one", "other"]

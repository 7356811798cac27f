"""Our layers in place of those of models that people already have."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.layers.ffn import APPROXIMATIONS, GeluFeedForward
from moe_zero.layers.token import TokenMoE

SPLIT_PAIRS = (("intermediate", "output"), ("intermediate_query", "output_query"))
"""BERT's way to write a feed-forward: two sibling modules with a product ``dense`` each, the second one with residual
and LayerNorm. Any other feed-forward is one module that owns both products."""


@dataclass
class PatchReport:
    """What :func:`patch_feed_forwards` did."""

    replaced: list[str] = field(default_factory=list)
    """Names of the feed-forwards that are ours now."""
    left: dict[str, str] = field(default_factory=dict)
    """Names of those that look like feed-forwards and were left alone, and why."""

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}: {', '.join(self.replaced) or 'none'}"]
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


class PatchedFeedForward(GeluFeedForward):
    """A :class:`GeluFeedForward` that computes with the two products of the module it replaced.

    The products stay the modules that they were, under the names that they had, so that state dicts, optimizers and
    whatever else refers to them see no difference.
    """

    def __init__(self, candidate: Candidate, approximate: str):
        nn.Module.__init__(self)
        self.approximate = approximate
        for name, child in candidate.module.named_children():
            self.add_module(name, child)
        # In tuples, because nn.Module would register them as children and put them into the state dict again.
        self._products = (candidate.first, candidate.second)
        self._replaced = (candidate.module,)
        self.dropout = candidate.outer_dropout or nn.Identity()
        self.train(candidate.module.training)
        _share_hooks(candidate.module, self)

    def weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        first, second = self._products
        return _weight(first), first.bias, _weight(second), second.bias

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, in place of {type(self._replaced[0]).__name__}"


class UpcycledFeedForward(TokenMoE):
    """A :class:`TokenMoE` whose experts start as copies of the feed-forward that it replaced."""

    def __init__(self, candidate: Candidate, approximate: str, num_experts: int, top_k: int):
        first, second = candidate.first, candidate.second
        like = {"device": first.weight.device, "dtype": first.weight.dtype}
        bias = first.bias is not None
        super().__init__(*_widths(first), num_experts, top_k, bias=bias, approximate=approximate, **like)
        dense = {"dense1.weight": _weight(first), "dense1.bias": first.bias}
        dense |= {"dense2.weight": _weight(second), "dense2.bias": second.bias}
        for expert in self.experts:
            expert.load_state_dict({name: tensor for name, tensor in dense.items() if tensor is not None})
        self.dropout = candidate.outer_dropout or nn.Identity()
        self._replaced = (candidate.module,)
        self._second = (second,)
        self.train(candidate.module.training)
        _share_hooks(candidate.module, self)


@dataclass
class Candidate:
    """A module that may be a two-layer GELU feed-forward, with its products."""

    name: str
    parent: nn.Module
    attribute: str
    """``parent.attribute`` is the module that gets replaced."""
    first: nn.Module
    second: nn.Module
    tail: nn.Module | None = None
    """The module that owns the second product, where that is not the replaced one."""
    outer_dropout: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        return getattr(self.parent, self.attribute)

    @property
    def watched(self) -> list[nn.Module]:
        """Modules that will no longer be called, or be called with other tensors."""
        inside = [m for m in self.module.modules() if m is not self.module and m is not self.outer_dropout]
        return inside if self.tail is None else [*inside, self.module, self.second]


def patch_feed_forwards(
    model: nn.Module,
    *,
    classes: Sequence[type | str] = (),
    names: Sequence[str] = (),
    experts: int | None = None,
    top_k: int = 1,
) -> PatchReport:
    """Replace in place the two-layer GELU feed-forwards of a model by :class:`GeluFeedForward`, or by experts.

    Works for one module with two products and a GELU between them (ViT, GPT-2, ``nn.Sequential``) and for BERT's pairs
    ``intermediate.dense`` and ``output.dense`` (also in the Q-Formers of BLIP-2 and InstructBLIP). Whether a module
    really computes ``second(gelu(first(x)))``, and with which GELU, is found out by running a float64 copy of it, not
    by its name. Weights, dtypes, devices, hooks, training flags and state-dict names stay as they are, so that
    ``save_pretrained`` and ``load_state_dict`` work as before.

    Args:
        model: any module; it is changed in place.
        classes: replace only modules of these classes (types or class names); for BERT's pairs, in layers of these.
        names: replace only modules whose name matches one of these patterns, such as ``"encoder.layer.[0-5].*"``.
        experts: upcycle: put a :class:`TokenMoE` of that many experts in place, each a copy of the feed-forward. Its
            gate starts at random and its weights sum to 1, so that the model computes the same as before until it is
            trained. In the state dict, the weights of gate and experts take the place of the feed-forward's own.
        top_k: experts per token, with ``experts``.

    Returns:
        What was replaced, and what was left alone and why. :func:`unpatch_feed_forwards` undoes it.

    Raises:
        ValueError: if one of ``classes`` or ``names`` matches no feed-forward; if ``top_k`` does not fit ``experts``.

    Source: Hendrycks and Gimpel, arXiv 1606.08415 (GELU); Komatsuzaki et al., arXiv 2212.05055 (upcycling).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    classes = (classes,) if isinstance(classes, str | type) else tuple(classes)
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names holds a {type(name).__name__}; it must hold patterns, such as 'encoder.layer.*'")
    if experts is not None and (isinstance(experts, bool) or not isinstance(experts, int) or experts < 1):
        raise ValueError(f"experts is {experts!r}; it must be an integer of at least 1")
    if experts is None and top_k != 1:
        raise ValueError(f"top_k is {top_k}, but experts is not given; top_k says how many of them a token passes")
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise ValueError(f"top_k is {top_k!r}; it must be an integer")
    if experts is not None and not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; it must be between 1 and experts, {experts}")
    report = PatchReport()
    everything = list(_candidates(model))
    candidates = [c for c in everything if _selected(c, classes, names)]
    idle = [c for c in classes if not any(_selected(candidate, (c,), ()) for candidate in everything)]
    idle += [n for n in names if not any(_selected(candidate, (), (n,)) for candidate in everything)]
    if idle:
        asked = ", ".join(repr(item) if isinstance(item, str) else item.__name__ for item in idle)
        known = ", ".join(c.name for c in everything) or "none"
        ours = [name for name, m in model.named_modules() if isinstance(m, PatchedFeedForward | UpcycledFeedForward)]
        patched = f"; patched already are {', '.join(ours)} (unpatch first)" if ours else ""
        raise ValueError(f"{asked} matches none of the model's feed-forwards; these are {known}{patched}")
    if _holds_products(model) and not (classes or names):
        report.left["the model itself"] = "only modules inside of a model can be replaced; wrap it in an nn.Sequential"
    for candidate in candidates:
        approximate, reason = _examine(candidate)
        if reason:
            report.left[candidate.name] = reason
            continue
        if experts is None:
            replacement = PatchedFeedForward(candidate, approximate)
            if candidate.tail is not None:
                candidate.second.forward = _identity
        else:
            replacement = UpcycledFeedForward(candidate, approximate, experts, top_k)
            if candidate.tail is not None:
                candidate.tail.dense = nn.Identity()
        setattr(candidate.parent, candidate.attribute, replacement)
        report.replaced.append(candidate.name)
    return report


def unpatch_feed_forwards(model: nn.Module) -> list[str]:
    """Put back every module that :func:`patch_feed_forwards` replaced; returns their names.

    Weights are as they are now. Experts are dropped: where they were, the feed-forward has the weights it had before.
    """
    restored = []
    for parent_name, parent in list(model.named_modules()):
        for attribute, child in list(parent.named_children()):
            if not isinstance(child, PatchedFeedForward | UpcycledFeedForward):
                continue
            (original,) = child._replaced
            original.train(child.training)
            setattr(parent, attribute, original)
            if isinstance(child, PatchedFeedForward):
                child._products[1].__dict__.pop("forward", None)
            elif attribute in dict(SPLIT_PAIRS):
                (getattr(parent, dict(SPLIT_PAIRS)[attribute]).dense,) = child._second
            restored.append(f"{parent_name}.{attribute}".lstrip("."))
    return restored


def _candidates(model: nn.Module) -> Iterator[Candidate]:
    """Everything that has the shape of a feed-forward: [D -> F] followed by [F -> D]."""
    for parent_name, parent in model.named_modules():
        children = dict(parent.named_children())
        for head, tail in SPLIT_PAIRS:
            if head in children and tail in children and not isinstance(children[head], GeluFeedForward):
                first, second = (getattr(children[name], "dense", None) for name in (head, tail))
                if _fit(first, second):
                    name = f"{parent_name}.{head}".lstrip(".")
                    yield Candidate(name, parent, head, first, second, children[tail])
        for attribute, module in children.items():
            if _holds_products(module):
                products = [child for child in module.children() if _widths(child)]
                yield Candidate(f"{parent_name}.{attribute}".lstrip("."), parent, attribute, *products)


def _holds_products(module: nn.Module) -> bool:
    """Whether a module's children have two products, [D -> F] and [F -> D]."""
    products = [child for child in module.children() if _widths(child)]
    return len(products) == 2 and _fit(*products) and not isinstance(module, GeluFeedForward)


def _selected(candidate: Candidate, classes: Sequence[type | str], names: Sequence[str]) -> bool:
    owner = candidate.module if candidate.tail is None else candidate.parent
    types = {kind.__name__ for kind in type(owner).__mro__}
    by_class = any((c if isinstance(c, str) else c.__name__) in types for c in classes)
    by_name = any(fnmatchcase(candidate.name, pattern) for pattern in names)
    return by_class or by_name or not (classes or names)


def _examine(candidate: Candidate) -> tuple[str, str]:
    """Which GELU the candidate computes with, or the reason why it can't be replaced; finds its outer dropout."""
    parameters = list(candidate.module.parameters()) + list(candidate.second.parameters())
    if any(p.is_meta for p in parameters):
        return "", "its weights are on the meta device; load them first"
    if (candidate.first.bias is None) != (candidate.second.bias is None):
        return "", "one of its products has a bias and the other has none"
    if any(not p.is_floating_point() for p in parameters):
        return "", f"its weights are {next(p.dtype for p in parameters if not p.is_floating_point())}, not floats"
    if (order := _call_order(candidate)) is None:
        return "", "its forward cannot be run on one tensor [rows, hidden size]"
    if order[:1] != [candidate.first] or order.count(candidate.second) != 1:
        return "", "its forward does not call its two products one after the other"
    place = order.index(candidate.second)
    inner, outer = ([m for m in part if m.p > 0] for part in (order[1:place], order[place + 1 :]))
    if inner:
        return "", "it drops activations between the two products"
    if len(outer) > 1:
        return "", "it drops its result twice"
    candidate.outer_dropout = outer[0] if outer else None
    if candidate.tail is not None and not _feeds_product_untouched(candidate):
        return "", f"its second half, {type(candidate.tail).__name__}, does not begin with the second product"
    if any(_has_hooks(module) for module in candidate.watched):
        return "", "hooks on the modules inside of it would not be called, or would see other tensors"
    return _which_gelu(candidate)


def _which_gelu(candidate: Candidate) -> tuple[str, str]:
    """The GELU with which ``second(gelu(first(x)))`` equals the candidate, or the reason why there is none."""
    width = _widths(candidate.first)[0]
    scales = torch.logspace(-1, 1, 8, dtype=torch.float64).unsqueeze(1)  # the two GELUs differ between 1 and 4 most
    x = torch.randn(8, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scales
    copied, training = _Copy(candidate), _Copy(candidate, training=True)
    for module in training.of(candidate.module).modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    expected = copied.run(x)
    if not torch.equal(training.run(x), expected):
        return "", "it behaves differently in training, other than by a dropout module"
    with torch.no_grad():
        pre_activation = _linear(copied.of(candidate.first), x)
        for approximate in APPROXIMATIONS:
            result = _linear(copied.of(candidate.second), F.gelu(pre_activation, approximate=approximate))
            if (result - expected).norm() <= 1e-9 * expected.norm():
                return approximate, ""
    return "", "it computes something else than second(gelu(first(x)))"


def _call_order(candidate: Candidate) -> list[nn.Module] | None:
    """The order in which the candidate calls its products and dropouts; ``None`` where it can't be run."""
    copied = _Copy(candidate)
    order: list[nn.Module] = []
    dropouts = [m for m in candidate.module.modules() if isinstance(m, nn.Dropout)]
    for module in dict.fromkeys([candidate.first, candidate.second, *dropouts]):
        copied.of(module).register_forward_pre_hook(lambda _m, _args, module=module: order.append(module))
    try:
        copied.run(torch.ones(1, _widths(candidate.first)[0], dtype=torch.float64))
    except Exception:  # whatever a foreign forward raises: it is none that can be replaced
        return None
    return order


def _feeds_product_untouched(candidate: Candidate) -> bool:
    """Whether the module that owns the second product hands it its own input as it is, in training too."""
    copied = _Copy(candidate, training=True)
    seen: list[Tensor] = []
    copied.of(candidate.second).register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    hidden, inner = _widths(candidate.first)
    x = torch.ones(1, inner, dtype=torch.float64)
    try:
        copied.of(candidate.tail)(x, torch.ones(1, hidden, dtype=torch.float64))
    except Exception:  # as above
        return False
    return len(seen) == 1 and torch.equal(seen[0], x)


class _Copy:
    """A candidate copied to the CPU in float64, without its users' hooks."""

    def __init__(self, candidate: Candidate, *, training: bool = False):
        self._candidate = candidate
        self._memo: dict = {}
        parts = [m for m in (candidate.module, candidate.second, candidate.tail) if m is not None]
        for module in {m for part in parts for m in part.modules()}:
            for name in CALL_HOOKS:  # a hook may be bound to anything, a whole trainer: it must not be copied along
                self._memo[id(getattr(module, name))] = OrderedDict()
        for part in copy.deepcopy(parts, self._memo):
            part.cpu().double().train(training)

    def of(self, module: nn.Module) -> nn.Module:
        return self._memo[id(module)]

    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.of(self._candidate.module)(x)
            return y if self._candidate.tail is None else self.of(self._candidate.second)(y)


def _widths(module: nn.Module | None) -> tuple[int, int] | None:
    """(in, out) of a product: ``nn.Linear``, or transformers' ``Conv1D``, which stores its weight transposed."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and module.weight.dim() == 2:
        return tuple(module.weight.shape)
    return None


def _fit(first: nn.Module | None, second: nn.Module | None) -> bool:
    widths = _widths(first)
    return widths is not None and _widths(second) == widths[::-1]


def _weight(product: nn.Module) -> Tensor:
    return product.weight if isinstance(product, nn.Linear) else product.weight.T


def _linear(product: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, _weight(product), product.bias)


def _identity(x: Tensor) -> Tensor:
    return x


CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in CALL_HOOKS)


def _share_hooks(source: nn.Module, target: nn.Module) -> None:
    """The same dictionaries, not copies: the handles that users hold must still remove their hooks."""
    for name, value in vars(source).items():
        if "hook" in name:
            setattr(target, name, value)

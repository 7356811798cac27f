"""Every option of the main job, in one frozen dataclass.

The command line, the YAML file and the run's folder all hold these fields and no others: `moe_zero.cli` makes its
options from them, `TrainConfig.load` reads a file with overrides, and `TrainConfig.save` writes what a run used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from moe_zero.qformer import QFormerConfig
from moe_zero.qformer.objectives import OBJECTIVES

PRESETS: dict[str, dict[str, Any]] = {
    # The shape of MiniLM-L6-H384, whose weights it starts from; the upper half of the layers routes.
    "small": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
        "moe_layers": (3, 4, 5),
    },
    # The published full-size model: 12 layers of 768.
    "seed": {},
}
ARCHITECTURE = (
    "num_query_tokens",
    "num_hidden_layers",
    "num_experts",
    "num_beams",
    "moe_layers",
    "cross_attention_freq",
)
"""Fields of `TrainConfig` that replace what the preset says when they are not None."""
FREE_ON_RESUME = (
    *("out", "nproc", "threads", "device", "resume", "overwrite", "skip_bad"),
    *("cache", "checkpoint_every", "log_every", "rerank"),
)
"""Fields that a resumed run may set otherwise than it was started with: none of them changes what is trained."""
DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-zero"


def option(default: Any, help: str, *, panel: str, **metadata: Any) -> Any:
    """A field with what the command line says about it; ``panel`` is the heading it is listed under."""
    return field(default=default, metadata={"help": help, "panel": panel, **metadata})


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Raises:
        ValueError: from the constructor, naming the field, its value and what would be right.
    """

    out: str = option("runs/train", "Folder of the run: metrics, plots, checkpoints.", panel="Run")
    nproc: int = option(
        1, "Processes to start on this machine; under torchrun the launcher's number counts.", panel="Run"
    )
    threads: int = option(0, "CPU threads of each process; 0 shares the cores out evenly.", panel="Run")
    device: str = option("auto", "auto, cpu or cuda.", panel="Run")
    seed: int = option(0, "Seed of initial weights, crops, batches and negatives.", panel="Run")
    resume: bool = option(False, "Continue the run in --out, with its settings, from its last checkpoint.", panel="Run")
    overwrite: bool = option(False, "Start anew although --out holds a run.", panel="Run")

    data: str = option(
        "photographs", "photographs (from scikit-image), or a .jsonl/.csv with image, caption.", panel="Data"
    )
    skip_bad: bool = option(False, "Leave bad rows of --data out and count them, instead of stopping.", panel="Data")
    train_crops: int = option(12, "Augmented crops of each picture to train on.", panel="Data")
    eval_crops: int = option(4, "Crops of each picture to evaluate with, never trained on.", panel="Data")
    max_text_tokens: int = option(32, "Longer captions are cut, [CLS] and [SEP] included.", panel="Data")
    cache: str = option(str(DEFAULT_CACHE), "Folder for image features, computed once.", panel="Data")

    encoder: str = option(
        "efficientnet-lite0",
        "Frozen image encoder: efficientnet-lite0, timm:NAME with --encoder-checkpoint, or hf:FOLDER.",
        panel="Model",
    )
    encoder_checkpoint: str | None = option(None, "Local weights for timm:NAME.", panel="Model")
    preset: str = option("small", "small (starts from MiniLM) or seed (the full-size model).", panel="Model")
    init: str = option("auto", "minilm, random, or auto: MiniLM for the preset small.", panel="Model")
    num_query_tokens: int | None = option(None, "Learned queries.", panel="Model")
    num_hidden_layers: int | None = option(None, "Transformer blocks.", panel="Model")
    num_experts: int | None = option(None, "Experts in a routed layer, the universal one included.", panel="Model")
    num_beams: int | None = option(None, "Beams of a sample, the universal one included.", panel="Model")
    moe_layers: tuple[int, ...] | None = option(None, "Layers that route.", panel="Model")
    cross_attention_freq: int | None = option(None, "Every how many layers the queries see the image.", panel="Model")
    embed_dim: int = option(256, "Width of the contrastive space.", panel="Model")

    objectives: tuple[str, ...] = option(
        OBJECTIVES, "What to train: itc (contrastive), itm (matching), lm (captions).", panel="Training"
    )
    gate_weight: float = option(0.01, "Weight of the gate loss, which keeps the experts evenly used.", panel="Training")
    steps: int = option(50, "Optimizer steps.", panel="Training")
    batch_size: int = option(16, "Pairs in a step, over all processes together.", panel="Training")
    lr: float = option(3e-4, "Highest learning rate.", panel="Training")
    min_lr: float = option(1e-6, "Learning rate at the end of the cosine.", panel="Training")
    warmup_steps: int | None = option(
        None, "Steps in which the learning rate rises; by default a fifth of all, at most 10.", panel="Training"
    )
    weight_decay: float = option(0.05, "AdamW's, except on biases, norms and the temperature.", panel="Training")
    clip_norm: float = option(1.0, "Largest gradient norm; 0 turns clipping off.", panel="Training")
    precision: str = option("fp32", "fp32, or bf16 for the products (weights and losses stay fp32).", panel="Training")
    dropout: float = option(0.0, "In attention and feed-forward.", panel="Training")
    checkpoint_every: int = option(20, "Steps between checkpoints; 0 writes only the last.", panel="Training")
    log_every: int = option(10, "Steps between lines where the output is no terminal.", panel="Training")
    rerank: int = option(0, "Evaluation: order the best N of each query again by the matching head.", panel="Training")

    def __post_init__(self) -> None:
        for name in ("moe_layers", "objectives"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        for item in fields(self):
            _check_type(item, getattr(self, item.name))
        for name in ("nproc", "train_crops", "eval_crops", "steps", "embed_dim"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "threads",
            "seed",
            "gate_weight",
            "weight_decay",
            "clip_norm",
            "checkpoint_every",
            "rerank",
            "min_lr",
        ):
            self._check(name, getattr(self, name) >= 0, "at least 0")
        self._check(
            "batch_size", self.batch_size >= 2, "at least 2: a contrastive loss needs something to contrast with"
        )
        self._check("batch_size", self.batch_size % self.nproc == 0, f"a multiple of nproc, which is {self.nproc}")
        self._check("max_text_tokens", 4 <= self.max_text_tokens <= 512, "from 4 to 512")
        self._check("data", bool(self.data.strip()), "photographs, or a .jsonl or .csv file")
        self._check("warmup_steps", 0 <= self.warmup <= self.steps, f"from 0 to steps, which is {self.steps}")
        self._check("lr", self.lr > 0, "greater than 0")
        self._check("log_every", self.log_every >= 1, "at least 1")
        self._check("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")
        self._check("min_lr", self.min_lr <= self.lr, f"at most lr, which is {self.lr}")
        self._check("device", self.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda")
        self._check("preset", self.preset in PRESETS, " or ".join(PRESETS))
        self._check("init", self.init in ("auto", "minilm", "random"), "auto, minilm or random")
        self._check("precision", self.precision in ("fp32", "bf16"), "fp32 or bf16")
        self._check(
            "objectives",
            bool(self.objectives) and set(self.objectives) <= set(OBJECTIVES) and "itc" in self.objectives,
            f"a list of {', '.join(OBJECTIVES)} with itc in it (retrieval and the negatives of itm rest on it)",
        )
        self._check(
            "rerank",
            not self.rerank or "itm" in self.objectives,
            "0 unless itm, whose head does it, is among objectives",
        )
        kind, _, rest = self.encoder.partition(":")
        self._check(
            "encoder",
            self.encoder == "efficientnet-lite0" or (kind in ("timm", "hf") and bool(rest)),
            "efficientnet-lite0, timm:NAME or hf:FOLDER",
        )
        self._check(
            "encoder_checkpoint",
            (kind == "timm") == (self.encoder_checkpoint is not None),
            "a file where encoder is timm:NAME (random weights see nothing), and only there",
        )
        model = self.qformer(encoder_width=8)  # its own errors name its own fields
        if model.beam_layers:
            routes = (model.num_experts - 1) ** len(model.beam_layers)
            if model.num_beams - 1 > routes:
                raise ValueError(
                    f"num_beams is {model.num_beams}; it must be at most {routes + 1}: {model.num_experts - 1} routed "
                    f"experts in {len(model.beam_layers)} layers make {routes} different routes, and one beam is the "
                    "universal expert's"
                )

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise ValueError(f"{name} is {list(value) if isinstance(value, tuple) else value!r}; it must be {wanted}")

    @property
    def warmup(self) -> int:
        """``warmup_steps``, or what stands for it."""
        return min(10, self.steps // 5) if self.warmup_steps is None else self.warmup_steps

    def qformer(self, encoder_width: int) -> QFormerConfig:
        """The model's configuration: the preset, the fields of `ARCHITECTURE` that are set, and the image width."""
        values = dict(PRESETS[self.preset])
        values |= {name: getattr(self, name) for name in ARCHITECTURE if getattr(self, name) is not None}
        layers = values.get("num_hidden_layers", QFormerConfig.num_hidden_layers)
        if self.moe_layers is None and self.num_hidden_layers is not None:
            values["moe_layers"] = tuple(range(layers // 2, layers))
        return QFormerConfig(
            encoder_width=encoder_width,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            **values,
        )

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
        """From a YAML file (or the defaults) with ``overrides`` laid over it.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: naming the file and the setting that is unknown or wrong.
        """
        values: dict[str, Any] = {}
        if path is not None:
            import yaml

            try:
                values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            except OSError as error:
                raise FileNotFoundError(f"config is {str(path)!r}, which cannot be read: {error.strerror}") from error
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
            if not isinstance(values, dict):
                raise ValueError(
                    f"{path} holds a {type(values).__name__}; it must be settings, one 'name: value' a line"
                )
            known = [item.name for item in fields(cls)]
            unknown = [str(name) for name in values if name not in known]
            if unknown:
                raise ValueError(
                    f"{path} has the unknown setting {', '.join(unknown)}; the settings are {', '.join(known)}"
                )
        try:
            return cls(**{**values, **(overrides or {})})
        except ValueError as error:
            raise ValueError(f"{path}: {error}" if path is not None else str(error)) from None

    def save(self, path: str | Path) -> None:
        """Write every field as YAML, in the form that `load` reads."""
        import yaml

        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        Path(path).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    def check_resumes(self, started: TrainConfig) -> None:
        """Refuse to continue a run with other settings than it was started with.

        Raises:
            ValueError: naming the field and both values.
        """
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(started, item.name)
            if item.name not in FREE_ON_RESUME and mine != theirs:
                raise ValueError(
                    f"{item.name} is {mine!r}, but the run in {self.out} was started with {theirs!r}; leave it out to "
                    "resume, or choose another --out"
                )

    def with_(self, **changes: Any) -> TrainConfig:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def _tuple(name: str, value: Any) -> tuple:
    """Lists from YAML and 'a,b' from the command line alike."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
        if name == "moe_layers":
            if not all(part.lstrip("-").isdigit() for part in value):
                raise ValueError(f"{name} is {','.join(value)!r}; it must be layer numbers, such as 3,4,5")
            value = [int(part) for part in value]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is {value!r}; it must be a list")
    return tuple(value)


ARTICLES = {"int": "an", "float": "a", "str": "a", "bool": "a"}
_TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _check_type(item: Field, value: Any) -> None:
    """YAML gives strings for what it does not understand (``3e-4`` without a dot), so types are checked, not
    assumed.
    """
    kind, _, optional = str(item.type).partition(" | ")
    if (optional and value is None) or kind.startswith("tuple"):
        return
    if not isinstance(value, _TYPES[kind]) or (kind != "bool" and isinstance(value, bool)):
        hint = " (YAML reads numbers such as 3e-4 as text: write 3.0e-4)" if kind == "float" else ""
        raise ValueError(
            f"{item.name} is {value!r}, a {type(value).__name__}; it must be {ARTICLES[kind]} {kind}{hint}"
        )

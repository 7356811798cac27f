"""Our Q-Former inside of transformers' whole models."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="needs transformers (extra hf)")

from moe_zero.qformer import QFormerModel, replace  # noqa: E402 (after the skip)
from moe_zero.qformer.checkpoint import export_state_dict, load_qformer  # noqa: E402
from moe_zero.qformer.replace import ReplacedQFormer, replace_qformer  # noqa: E402

B, Q, T, IMAGE_TOKEN = 2, 5, 4, 59
FAMILY = {"blip2": "Blip2", "instructblip": "InstructBlip", "instructblipvideo": "InstructBlipVideo"}
GENERATING = [
    ("Blip2ForConditionalGeneration", "opt"),
    ("Blip2ForConditionalGeneration", "t5"),
    ("InstructBlipForConditionalGeneration", "opt"),
    ("InstructBlipForConditionalGeneration", "t5"),
]


def build(name: str, text: str = "opt", *, use_text: bool = False, **changes) -> nn.Module:
    """A small random model, every parameter of it random."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    family = max((family for family in FAMILY.values() if name.startswith(family)), key=len)
    vision = getattr(transformers, f"{family}VisionConfig")(
        hidden_size=20, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    qformer = {
        "vocab_size": 50,
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "max_position_embeddings": 16,
        "layer_norm_eps": 1e-6,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **changes,
    }
    if family == "Blip2":
        qformer["use_qformer_text_input"] = use_text
    if text == "opt":
        language = transformers.OPTConfig(
            vocab_size=60,
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            dropout=0.0,
            architectures=["OPTForCausalLM"],  # InstructBLIP of transformers 4 looks at it
            bos_token_id=2,
            eos_token_id=3,
            pad_token_id=1,
        )
    else:
        language = transformers.T5Config(
            vocab_size=60,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    tokens = {"video_token_index": IMAGE_TOKEN} if family == "InstructBlipVideo" else {"image_token_index": IMAGE_TOKEN}
    config = getattr(transformers, f"{family}Config")(
        vision_config=vision.to_dict(),
        qformer_config=getattr(transformers, f"{family}QFormerConfig")(**qformer).to_dict(),
        text_config=language.to_dict(),
        num_query_tokens=Q,
        **tokens,
    )
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            is_norm = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
            p.normal_(mean=1.0 if is_norm else 0.0, std=0.2)
    return model.eval()


def inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    name = type(model).__name__
    frames = 2 if "Video" in name else 1
    text = torch.cat([torch.full((B, Q * frames), IMAGE_TOKEN), torch.randint(4, 50, (B, T))], dim=1)
    batch = {"pixel_values": torch.randn(B, 3, 8, 8), "input_ids": text, "attention_mask": torch.ones_like(text)}
    if frames > 1:
        batch["pixel_values"] = torch.randn(B, frames, 3, 8, 8)
    if name.startswith("InstructBlip"):
        batch["qformer_input_ids"] = torch.randint(1, 50, (B, T))
        batch["qformer_attention_mask"] = torch.ones(B, T, dtype=torch.int64)
        batch["qformer_attention_mask"][-1, T // 2 :] = 0
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(4, 50, (B, 3))
    return batch


def replaced_copy(model: nn.Module, **options) -> nn.Module:
    return replace_qformer(copy.deepcopy(model), **options)


def moved(model: nn.Module) -> None:
    """A step of training, so that nothing can pass for freshly loaded."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))


@pytest.mark.parametrize(("name", "text"), [*GENERATING, ("InstructBlipVideoForConditionalGeneration", "opt")])
def test_logits_and_loss_and_gradients_stay(name, text):
    theirs = build(name, text)
    ours = replaced_copy(theirs)
    batch = inputs(theirs)
    batch["labels"] = batch.get("decoder_input_ids", batch["input_ids"])
    found, expected = ours(**batch), theirs(**batch)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=1e-5)
    outputs = found.qformer_outputs
    torch.testing.assert_close(outputs.pooler_output, expected.qformer_outputs.pooler_output, rtol=0, atol=1e-5)
    assert outputs.gate_loss is None
    found.loss.backward()
    expected.loss.backward()
    for kept in ("query_tokens", "language_projection.weight", "vision_model.post_layernorm.weight"):
        mine, other = ours.get_parameter(kept).grad, theirs.get_parameter(kept).grad
        assert (mine - other).norm() <= 1e-4 * other.norm()


@pytest.mark.parametrize(("name", "text"), GENERATING)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_generate_writes_the_same(name, text, num_beams):
    theirs = build(name, text)
    ours = replaced_copy(theirs)
    batch = inputs(theirs)
    batch.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": num_beams}
    assert torch.equal(ours.generate(**batch, **options), theirs.generate(**batch, **options))


@pytest.mark.parametrize("name", ["Blip2Model", "InstructBlipModel", "InstructBlipVideoModel"])
def test_models_without_generation_stay(name):
    theirs = build(name)
    ours = replaced_copy(theirs)
    batch = inputs(theirs)
    found, expected = (model(**batch).qformer_outputs.last_hidden_state for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("matching", [True, False])
def test_retrieval_stays(matching):
    theirs = build("Blip2ForImageTextRetrieval", use_text=True)
    theirs.config.image_token_index = None  # text comes without places for the queries
    ours = replaced_copy(theirs)
    batch = inputs(theirs)
    batch = {name: tensor[:, Q:] if name != "pixel_values" else tensor for name, tensor in batch.items()}
    batch["attention_mask"][-1, -2:] = 0
    found, expected = (model(**batch, use_image_text_matching_head=matching) for model in (ours, theirs))
    torch.testing.assert_close(found.logits_per_image, expected.logits_per_image, rtol=0, atol=1e-5)


def test_projections_stay():
    theirs = build("Blip2VisionModelWithProjection")
    pixels = torch.randn(B, 3, 8, 8)
    found, expected = (model(pixel_values=pixels).image_embeds for model in (replaced_copy(theirs), theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    theirs = build("Blip2TextModelWithProjection", use_text=True)
    text = {"input_ids": torch.randint(1, 50, (B, T)), "attention_mask": torch.ones(B, T, dtype=torch.int64)}
    text["attention_mask"][0, 2:] = 0
    found, expected = (model(**text).text_embeds for model in (replaced_copy(theirs), theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_outputs_come_as_tuples_and_with_hidden_states():
    theirs = build("Blip2ForConditionalGeneration")
    ours = replaced_copy(theirs)
    batch = inputs(theirs)
    torch.testing.assert_close(ours(**batch, return_dict=False)[0], theirs(**batch, return_dict=False)[0])
    rows = {"query_embeds": torch.randn(B, Q, 24), "encoder_hidden_states": torch.randn(B, 3, 20)}
    found, expected = (model.qformer(**rows, output_hidden_states=True).hidden_states for model in (ours, theirs))
    assert len(found) == len(expected) == 5
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    assert isinstance(ours.qformer(**rows, return_dict=False), tuple)


@pytest.mark.parametrize("name", ["Blip2ForConditionalGeneration", "InstructBlipForConditionalGeneration"])
def test_a_dense_model_is_saved_as_transformers_own(name, tmp_path):
    theirs = build(name)
    ours = replace_qformer(theirs)
    moved(ours)
    batch = inputs(ours)
    expected = ours(**batch).logits
    ours.save_pretrained(tmp_path)
    again, found = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(again.eval()(**batch).logits, expected, rtol=0, atol=1e-5)
    replaced, found = type(ours).from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(replaced.qformer, ReplacedQFormer)
    assert not found["missing_keys"]
    assert torch.equal(replaced.eval()(**batch).logits, expected)
    assert all(torch.equal(p, replaced.get_parameter(key)) for key, p in ours.named_parameters())


@pytest.mark.parametrize("name", ["Blip2ForConditionalGeneration", "InstructBlipForConditionalGeneration"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_mixture_survives_saving(name, shards, tmp_path):
    ours = replace_qformer(build(name), num_experts=4, num_beams=3, moe_layers=(1, 3), residual_from="parent")
    moved(ours)
    batch = inputs(ours)
    expected = ours(**batch)
    assert expected.qformer_outputs.gate_loss > 0
    assert expected.qformer_outputs.expert_route.shape == (B, 2)
    ours.save_pretrained(tmp_path, **({"max_shard_size": "50KB"} if shards else {}))
    again, found = getattr(replace, name).from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(ours)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again(**batch).logits, expected.logits)
    assert again.qformer.encoder.layer[1].residual_from == "parent"

    taken, report = load_qformer(tmp_path)
    assert (report.layout, report.missing, report.unexplained) == ("moe-zero", [], [])
    assert taken.config.routed_layers == (1, 3)
    assert torch.equal(taken.encoder.layer[3].experts.gate.weight, ours.qformer.encoder.layer[3].experts.gate.weight)


def test_a_state_dict_that_is_handed_in_is_saved(tmp_path):
    ours = replace_qformer(build("Blip2ForConditionalGeneration"))
    state = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    state["qformer.encoder.layer.0.expert_ln.bias"] += 1
    ours.save_pretrained(tmp_path, state_dict=state)
    again = transformers.Blip2ForConditionalGeneration.from_pretrained(tmp_path)
    bias = again.qformer.encoder.layer[0].output_query.LayerNorm.bias
    assert torch.equal(bias, state["qformer.encoder.layer.0.expert_ln.bias"])


@pytest.mark.parametrize("name", ["Blip2ForConditionalGeneration", "InstructBlipForConditionalGeneration"])
def test_an_equal_mixture_starts_where_the_dense_model_is(name):
    theirs = build(name)
    ours = replaced_copy(theirs, num_experts=3, num_beams=3, equal=True)
    batch = inputs(theirs)
    torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, rtol=0, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(**batch, **options), theirs.generate(**batch, **options))
    published = replaced_copy(theirs, num_experts=3, num_beams=3)
    assert (published(**batch).logits - theirs(**batch).logits).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "mixture",
    [{}, {"num_experts": 3}, {"num_experts": 3, "routing": "pre_route"}, {"num_experts": 3, "routing": "token"}],
    ids=str,
)
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, mixture):
    ours = replace_qformer(build("InstructBlipForConditionalGeneration"), **mixture)
    moved(ours)
    ours.train()
    batch = inputs(ours)
    batch["labels"] = batch["input_ids"]

    def gradients() -> dict[str, torch.Tensor]:
        ours.zero_grad()
        output = ours(**batch)
        (output.loss + (output.qformer_outputs.gate_loss if mixture else 0)).backward()
        return {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}

    expected = gradients()
    calls = []
    hook = ours.qformer.encoder.layer[0].register_forward_pre_hook(lambda *_: calls.append(1))
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    found = gradients()
    hook.remove()
    assert len(calls) == 2, "the first block runs again in backward"
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")
def test_gradient_checkpointing_of_the_replaced_stays_on():
    theirs = build("Blip2ForConditionalGeneration")
    theirs.gradient_checkpointing_enable()
    assert replace_qformer(theirs).qformer.encoder.gradient_checkpointing
    theirs.gradient_checkpointing_disable()
    assert not theirs.qformer.encoder.gradient_checkpointing


def test_what_is_frozen_and_how_it_is_kept_stays():
    theirs = build("Blip2ForConditionalGeneration")
    theirs.qformer.encoder.layer[1].requires_grad_(False)
    theirs.train()
    theirs.half()
    theirs.qformer.float()
    ours = replace_qformer(theirs, num_experts=2, num_beams=2, moe_layers=(1, 2))
    assert ours.qformer.training
    assert ours.qformer.dtype == torch.float32
    frozen = {name for name, p in ours.qformer.named_parameters() if not p.requires_grad}
    assert all(name.startswith("encoder.layer.1.") for name in frozen)
    assert "encoder.layer.1.experts.experts.1.dense2.bias" in frozen
    assert "encoder.layer.1.experts.gate.weight" not in frozen
    seen = ours.qformer(torch.randn(B, Q, 24).half(), encoder_hidden_states=torch.randn(B, 3, 20).half())
    assert seen.last_hidden_state.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_keeps_the_qformer_as_transformers_does(dtype, tmp_path):
    asked = {"dtype" if int(transformers.__version__.partition(".")[0]) > 4 else "torch_dtype": dtype}
    replace_qformer(build("Blip2ForConditionalGeneration"), num_experts=3).save_pretrained(tmp_path)
    ours = replace.Blip2ForConditionalGeneration.from_pretrained(tmp_path, **asked)
    assert ours.language_projection.weight.dtype == dtype
    reference = build("Blip2ForConditionalGeneration")
    replace_qformer(reference).save_pretrained(tmp_path / "dense")
    theirs = transformers.Blip2ForConditionalGeneration.from_pretrained(tmp_path / "dense", **asked)
    assert ours.qformer.dtype == theirs.qformer.layernorm.weight.dtype
    assert torch.isfinite(ours(**inputs(ours) | {"pixel_values": torch.randn(B, 3, 8, 8, dtype=dtype)}).logits).all()


@pytest.mark.filterwarnings("ignore:.*device_map keys:UserWarning")
@pytest.mark.parametrize("experts", [1, 3])
def test_accelerate_prepares_trains_and_dispatches(experts, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate (extra hf)")
    ours = replace_qformer(build("Blip2ForConditionalGeneration"), num_experts=experts)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    batch = inputs(ours)
    before = ours.qformer.encoder.layer[0].experts.dense1.weight.clone()
    accelerator.backward(model(**batch, labels=batch["input_ids"]).loss)
    optimizer.step()
    assert not torch.equal(before, ours.qformer.encoder.layer[0].experts.dense1.weight)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(tmp_path, state_dict=accelerator.get_state_dict(model))
    expected = ours.eval()(**batch).logits
    again = type(ours).from_pretrained(tmp_path, device_map={"": "cpu"})
    torch.testing.assert_close(again.eval()(**batch).logits, expected, rtol=0, atol=1e-5)
    parts = {name: "cpu" for name, _ in ours.named_children()} | {"query_tokens": "cpu"}
    dispatched = accelerate.dispatch_model(again, parts, main_device="cpu", force_hooks=True)
    torch.testing.assert_close(dispatched(**batch).logits, expected, rtol=0, atol=1e-5)


def test_copies_and_pickles():
    ours = replace_qformer(build("Blip2ForConditionalGeneration"), num_experts=3)
    batch = inputs(ours)
    expected = ours(**batch).logits
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is replace.Blip2ForConditionalGeneration
        assert torch.equal(other(**batch).logits, expected)


def test_the_classes_build_from_a_configuration():
    config = build("Blip2ForConditionalGeneration").config
    dense = replace.Blip2ForConditionalGeneration(config)
    assert isinstance(dense.qformer, ReplacedQFormer)
    assert type(dense.qformer.encoder.layer[3].experts).__name__ == "GeluFeedForward"
    assert issubclass(replace.Blip2ForConditionalGeneration, transformers.Blip2ForConditionalGeneration)
    with pytest.raises(AttributeError, match="no attribute 'BertModel'"):
        replace.BertModel  # noqa: B018


def test_what_can_not_be_replaced_is_said():
    ours = replace_qformer(build("Blip2ForConditionalGeneration"))
    with pytest.raises(ValueError, match="is replaced already"):
        replace_qformer(ours)
    with pytest.raises(ValueError, match="Linear has no Q-Former"):
        replace_qformer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="merge is for a mixture"):
        replace_qformer(build("Blip2ForConditionalGeneration"), merge="mean")
    with pytest.raises(ValueError, match="hidden_act is 'relu'"):
        replace_qformer(build("Blip2ForConditionalGeneration", hidden_act="relu"))
    with torch.device("meta"):
        empty = build("Blip2ForConditionalGeneration")
    with pytest.raises(ValueError, match="offloaded or not loaded"):
        replace_qformer(empty)
    with pytest.raises(ValueError, match="has 8 rows, 5 of them queries"):
        ours.qformer(torch.randn(B, 8, 24), query_length=5, encoder_hidden_states=torch.randn(B, 3, 20))
    instruct = replace_qformer(build("InstructBlipForConditionalGeneration"))
    with pytest.raises(ValueError, match="position_ids is given"):
        instruct.qformer(torch.ones(B, T, dtype=torch.int64), position_ids=torch.arange(T)[None])
    with pytest.raises(ValueError, match="neither query_embeds nor input_ids"):
        instruct.qformer()


def test_weights_go_back_into_a_whole_model():
    theirs, other = (build("Blip2ForConditionalGeneration") for _ in range(2))
    state = export_state_dict(QFormerModel.from_checkpoint(theirs), "blip2", prefix="qformer.")
    assert not other.load_state_dict(state, strict=False).unexpected_keys
    for name in state:
        assert torch.equal(theirs.get_parameter(name), other.get_parameter(name))


def test_the_package_does_not_import_transformers():
    code = "import sys, moe_zero.qformer.checkpoint; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_replaced_model_is_a_checkpoint():
    theirs = build("InstructBlipForConditionalGeneration")
    expected = QFormerModel.from_checkpoint(theirs).state_dict()
    found = QFormerModel.from_checkpoint(replace_qformer(theirs)).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

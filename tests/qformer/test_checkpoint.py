"""Q-Formers in and out of other people's checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from moe_zero.qformer import QFormerConfig, QFormerModel, load_qformer, save_qformer, upcycle
from moe_zero.qformer.checkpoint import convert, export_state_dict, parse_settings
from moe_zero.qformer.layouts import LAYOUT_NAMES
from moe_zero.qformer.weight_files import open_weights
from small_qformer import SMALL

safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors (extra hf)")

DENSE = replace(
    SMALL,
    moe_layers=(),
    num_experts=1,
    layer_norm_eps=1e-6,
    vision_layer_norm_eps=1e-5,
    hidden_dropout_prob=0.1,
    initializer_range=0.2,
)
MIXTURE = replace(DENSE, moe_layers=(2, 3), num_experts=4, num_beams=3, weight_type="one_hot")
GIVEN = {name: getattr(DENSE, name) for name in ("num_attention_heads", "layer_norm_eps")}
B, T, P = 3, 6, 7


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter random, so that none can be mistaken for another."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(mean=1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, std=0.2)
    return model.eval()


def build(config: QFormerConfig = DENSE) -> QFormerModel:
    return randomised(QFormerModel(config))


def inputs(config: QFormerConfig = DENSE) -> dict[str, torch.Tensor]:
    """Queries, padded text, padded image."""
    mask, image_mask = torch.ones(B, T, dtype=torch.int64), torch.ones(B, P, dtype=torch.int64)
    mask[-1, T // 2 :] = 0
    image_mask[0, P // 2 :] = 0
    return {
        "query_embeds": torch.randn(B, config.num_query_tokens, config.hidden_size),
        "input_ids": torch.randint(1, 50, (B, T)),
        "attention_mask": mask,
        "encoder_hidden_states": torch.randn(B, P, config.encoder_width),
        "encoder_attention_mask": image_mask,
    }


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# Round trips


@pytest.mark.parametrize("to", [name for name in LAYOUT_NAMES if name != "bert"])
@pytest.mark.parametrize("target", ["folder", "file.safetensors", "file.pth"])
def test_a_dense_model_comes_back_bit_for_bit_with_its_configuration(to, target, tmp_path):
    model = build()
    save_qformer(model, tmp_path / target, to=to)
    loaded, report = load_qformer(tmp_path / target)
    assert report.layout == to
    assert same_weights(model, loaded)
    assert loaded.config == DENSE
    assert not loaded.training


@pytest.mark.parametrize("to", ["moe-zero", "published"])
@pytest.mark.parametrize("target", ["folder", "file.safetensors", "file.pth"])
@pytest.mark.parametrize("routing", ["post_route", "pre_route", "token"])
def test_a_mixture_comes_back_bit_for_bit_with_its_configuration(to, target, routing, tmp_path):
    config = replace(MIXTURE, routing=routing)
    model = build(config)
    save_qformer(model, tmp_path / target, to=to)
    loaded = QFormerModel.from_checkpoint(tmp_path / target)
    assert same_weights(model, loaded)
    assert loaded.config == config


@pytest.mark.parametrize("to", ["moe-zero", "lavis", "blip2"])
def test_a_model_without_text_comes_back_bit_for_bit(to, tmp_path):
    model = build(replace(DENSE, use_text=False))
    save_qformer(model, tmp_path / "there", to=to)
    loaded = QFormerModel.from_checkpoint(tmp_path / "there")
    assert same_weights(model, loaded)
    assert loaded.config == model.config
    arguments = inputs()
    arguments = {name: arguments[name] for name in ("query_embeds", "encoder_hidden_states")}
    assert loaded(**arguments).last_hidden_state.shape == (B, 5, 24)
    with pytest.raises(ValueError, match="built without text"):
        loaded(**inputs())


def test_through_every_layout_in_turn_nothing_changes(tmp_path):
    model = build()
    here = save_qformer(model, tmp_path / "start.safetensors")
    for to in ("lavis", "blip2", "published", "instructblip", "moe-zero"):
        convert(here, there := tmp_path / f"{to}.safetensors", to=to)
        here = there
    assert same_weights(model, QFormerModel.from_checkpoint(here))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_their_dtype_unless_another_is_asked_for(dtype, tmp_path):
    model = build().to(dtype)
    path = save_qformer(model, tmp_path / "low.safetensors")
    assert same_weights(model, QFormerModel.from_checkpoint(path))
    assert {p.dtype for p in QFormerModel.from_checkpoint(path, dtype=torch.float32).parameters()} == {torch.float32}


def test_the_loaded_model_does_not_share_memory_with_its_source():
    model = build()
    loaded = QFormerModel.from_checkpoint(model)
    with torch.no_grad():
        model.query_tokens.zero_()
    assert loaded.query_tokens.abs().min() > 0
    assert all(p.requires_grad for p in loaded.parameters())


# Names and places


def test_published_names_without_prefix_and_under_a_wrapper():
    model = build(MIXTURE)
    state = {f"module.{name}": tensor for name, tensor in export_state_dict(model, "published").items()}
    state["module.Qformer.bert.embeddings.position_ids"] = torch.arange(16)[None]
    state["module.Qformer.cls.predictions.bias"] = torch.zeros(50)
    settings = {**GIVEN, "num_beams": 3, "weight_type": "one_hot"}
    loaded, report = load_qformer({"model": state, "epoch": 3}, **settings)
    assert (report.layout, report.prefix) == ("published", "module.Qformer.bert.")
    assert same_weights(model, loaded)
    assert report.left["module.Qformer.cls.predictions.bias"] == "the language-modelling head"
    bare = {
        name.removeprefix("module.").removeprefix("Qformer.bert."): t for name, t in state.items() if "cls" not in name
    }
    assert same_weights(model, QFormerModel.from_checkpoint(bare, **settings))


def test_lavis_epsilons_and_heads_are_assumed_and_said():
    wide = replace(DENSE, hidden_size=128, num_attention_heads=2)
    state = export_state_dict(build(wide), "lavis")
    state |= {
        "visual_encoder.cls_token": torch.zeros(1),
        "temp": torch.zeros(1),
        "vision_proj.weight": torch.zeros(2, 2),
    }
    loaded, report = load_qformer(state)
    assert loaded.config.num_attention_heads == 2
    assert (loaded.config.layer_norm_eps, loaded.config.vision_layer_norm_eps) == (1e-12, 1e-5)
    assert report.settings["num_attention_heads"] == "2, not recorded: BERT's heads have size 64"
    assert report.settings["layer_norm_eps"] == "1e-12, not recorded: BERT's"
    assert set(report.left.values()) == {"the image encoder", "the contrastive temperature", "a contrastive projection"}
    text = str(report)
    assert "names of LAVIS, under 'Qformer.bert.'" in text
    assert "left 1: the image encoder (visual_encoder.cls_token ...)" in text


def test_every_tensor_of_a_whole_model_is_accounted_for():
    state = export_state_dict(build(), "lavis") | {
        f"visual_encoder.blocks.{i}.weight": torch.zeros(1) for i in range(3)
    }
    _, report = load_qformer(state, **GIVEN)
    assert set(report.taken.values()) | set(report.left) == set(state)
    assert not set(report.taken.values()) & set(report.left)


def test_names_of_the_first_bert_checkpoints():
    state = export_state_dict(build(MIXTURE), "bert", prefix="bert.")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in state.items()
    }
    old |= {"bert.pooler.dense.weight": torch.zeros(1), "cls.predictions.bias": torch.zeros(1)}
    settings = {**GIVEN, "encoder_width": 20, "query_ffn_from_text": True, "allow_missing": True}
    loaded, report = load_qformer(old, **settings)
    assert not report.unexplained
    expected, _ = load_qformer(state, **settings)
    kept = set(report.taken)
    assert "encoder.layer.3.expert_ln.weight" in kept
    assert all(torch.equal(loaded.get_parameter(name), expected.get_parameter(name)) for name in kept)


def test_sharded_safetensors_and_torch_files(tmp_path):
    model = build()
    state = export_state_dict(model, "lavis")
    names = sorted(state)
    for kind, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        folder = tmp_path / suffix
        folder.mkdir()
        weight_map = {}
        for shard in range(3):
            part, file = names[shard::3], f"{kind}-{shard}.{suffix}"
            tensors = {name: state[name] for name in part}
            if suffix == "bin":
                torch.save(tensors, folder / file)
            else:
                safetensors_torch.save_file(tensors, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = folder / f"{kind}.{suffix}.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert same_weights(model, QFormerModel.from_checkpoint(folder, **GIVEN))
        assert same_weights(model, QFormerModel.from_checkpoint(index, **GIVEN))
        (folder / f"{kind}-1.{suffix}").unlink()
        with pytest.raises(FileNotFoundError, match=f"names the shard {kind}-1.{suffix}"):
            open_weights(folder)


def test_files_in_the_format_of_before_torch_1_6(tmp_path):
    model = build()
    torch.save({"model": export_state_dict(model, "lavis")}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same_weights(model, QFormerModel.from_checkpoint(tmp_path / "old.pth", **GIVEN))


# Errors


def test_missing_and_unknown_weights_are_named_unless_allowed():
    state = export_state_dict(build(), "lavis")
    del state["query_tokens"], state["Qformer.bert.encoder.layer.2.output.dense.bias"]
    state["Qformer.bert.encoder.layer.1.adapter.weight"] = torch.zeros(1)
    names = r"lacks query_tokens, encoder\.layer\.2\.output\.dense\.bias; .*known of, Qformer\.bert\S*adapter\.weight"
    with pytest.raises(ValueError, match=names):
        load_qformer(state, **GIVEN)
    loaded, report = load_qformer(state, allow_missing=True, num_query_tokens=7, **GIVEN)
    assert loaded.query_tokens.shape == (1, 7, 24)
    assert report.missing == ["query_tokens", "encoder.layer.2.output.dense.bias"]
    assert "missing, newly initialised: query_tokens" in str(report)
    assert "left, and not known what for: Qformer.bert.encoder.layer.1.adapter.weight" in str(report)


def test_what_is_missing_is_initialised_as_in_a_new_model():
    state = {
        name: tensor for name, tensor in export_state_dict(build(MIXTURE), "published").items() if "layer.0" in name
    }
    state |= {name: tensor for name, tensor in export_state_dict(build(MIXTURE), "published").items() if "gate" in name}
    state |= {f"Qformer.bert.encoder.layer.2.experts.experts.{e}.dense1.weight": torch.zeros(40, 24) for e in range(4)}
    sizes = {"num_beams": 3, "num_query_tokens": 5, "vocab_size": 50, "initializer_range": 0.2, **GIVEN}
    loaded, report = load_qformer(state, allow_missing=True, **sizes)
    new = QFormerModel(loaded.config)
    assert len(report.missing) > 50
    for name in report.missing:
        found, expected = loaded.get_parameter(name), new.get_parameter(name)
        assert found.shape == expected.shape
        if expected.unique().numel() == 1:
            assert torch.equal(found, expected), name
        else:
            assert 0.15 < found.std() < 0.25, name
            assert torch.equal(found == 0, expected == 0), name


def test_settings_that_contradict_the_weights_are_named(tmp_path):
    path = save_qformer(build(), tmp_path)
    with pytest.raises(ValueError, match=r"hidden_size is 32 \(given\), but the weights have 24"):
        load_qformer(path, hidden_size=32)
    with pytest.raises(ValueError, match=r"num_experts is 3 \(given\), but the weights have 1; .* upcycle"):
        load_qformer(path, num_experts=3)
    with pytest.raises(ValueError, match="unknown Q-Former setting width"):
        load_qformer(path, width=32)
    (tmp_path / "config.json").write_text(json.dumps({"encoder_hidden_size": 99}))
    with pytest.raises(ValueError, match=r"encoder_width is 99 \(from config.json\), but the weights have 20"):
        load_qformer(path)


def test_other_activations_and_positions_are_refused():
    state = export_state_dict(build(), "blip2", prefix="qformer.")

    class Other(nn.Module):
        def __init__(self, **config):
            super().__init__()
            self.config = type("Config", (), {"to_dict": lambda _: {"qformer_config": config}})()

        def state_dict(self):
            return state

    with pytest.raises(ValueError, match="hidden_act is 'gelu_new'"):
        load_qformer(Other(hidden_act="gelu_new"))
    with pytest.raises(ValueError, match="position_embedding_type is 'relative_key'"):
        load_qformer(Other(position_embedding_type="relative_key"))


def test_settings_that_another_version_wrote_are_not_passed_over(tmp_path):
    save_qformer(build(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"expert_colour": "blue"}))
    with pytest.raises(ValueError, match=r"unknown Q-Former setting expert_colour \(from config\.json\)"):
        load_qformer(tmp_path)


def test_the_configuration_of_another_model_beside_a_file_is_not_taken(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 99, "num_attention_heads": 2}))
    path = save_qformer(build(), tmp_path / "ours.safetensors")
    assert QFormerModel.from_checkpoint(path).config == DENSE


def test_the_number_of_beams_is_not_guessed():
    state = export_state_dict(build(MIXTURE), "published")
    with pytest.raises(ValueError, match="num_beams is not recorded in a state dict"):
        load_qformer(state, **GIVEN)


def test_a_mixture_has_no_place_in_a_dense_layout(tmp_path):
    for to in ("lavis", "blip2", "instructblip"):
        with pytest.raises(
            ValueError, match=r"experts in layers \[2, 3\].*layouts for a mixture are moe-zero, published"
        ):
            save_qformer(build(MIXTURE), tmp_path / to, to=to)
        assert not (tmp_path / to).exists()
    with pytest.raises(ValueError, match="to is 'clip'; it must be one of 'moe-zero'"):
        export_state_dict(build(), "clip")
    with pytest.raises(ValueError, match="has no text side"):
        export_state_dict(build(replace(DENSE, use_text=False)), "instructblip")


def test_files_that_are_no_checkpoints_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no weights at .*nowhere"):
        load_qformer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nor one weight file alone: found none"):
        load_qformer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not really")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_qformer(tmp_path)
    (tmp_path / "model.pth").write_bytes(b"not really")
    with pytest.raises(ValueError, match=r"model\.pth"):
        load_qformer(tmp_path / "model.pth")
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "code.pth")
    with pytest.raises(ValueError, match="could run any code"):
        load_qformer(tmp_path / "code.pth")
    torch.save({"lr": 0.1}, tmp_path / "empty.pth")
    with pytest.raises(ValueError, match="holds no tensors; its keys are lr"):
        load_qformer(tmp_path / "empty.pth")
    with pytest.raises(ValueError, match="there is none among 2 names, such as bias, weight"):
        load_qformer(nn.Linear(2, 2))


def test_settings_of_a_command_line():
    given = [
        "num_beams=3",
        "weight_type=one_hot",
        "use_text=false",
        "cross_attention_layers=[0, 2]",
        "layer_norm_eps=1e-5",
    ]
    assert parse_settings(given) == {
        "num_beams": 3,
        "weight_type": "one_hot",
        "use_text": False,
        "cross_attention_layers": [0, 2],
        "layer_norm_eps": 1e-5,
    }
    with pytest.raises(ValueError, match="setting 'num_beams' must be NAME=VALUE"):
        parse_settings(["num_beams"])


def test_convert_does_not_overwrite_its_source(tmp_path):
    path = save_qformer(build(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="which is the source"):
        convert(path, tmp_path / "." / "model.safetensors")


# Transformers


def transformers():
    return pytest.importorskip("transformers", reason="needs transformers (extra hf)")


def qformer_settings(**changes) -> dict:
    return {
        "vocab_size": 50,
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "max_position_embeddings": 16,
        "encoder_hidden_size": 20,
        "layer_norm_eps": 1e-6,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **changes,
    }


def gradients(model: nn.Module, output: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def assert_same_gradients(ours: QFormerModel, mine: torch.Tensor, theirs: nn.Module, other: torch.Tensor, taken: dict):
    expected, found = gradients(theirs, other), gradients(ours, mine)
    scale = max(gradient.norm() for gradient in expected.values())
    compared = 0
    for name, gradient in found.items():
        if (reference := expected.get(taken.get(name))) is None:
            continue
        # The gradient of a key's bias is 0 but for rounding, hence the second term.
        assert (gradient - reference).norm() <= 1e-4 * reference.norm() + 1e-6 * scale, name
        compared += 1
    assert compared == len(found)


def test_instructblip_qformer_computes_the_same():
    library = transformers()
    theirs = randomised(library.InstructBlipQFormerModel(library.InstructBlipQFormerConfig(**qformer_settings())))
    ours, report = load_qformer(theirs, allow_missing=True)
    assert report.layout == "instructblip"
    assert report.missing == ["query_tokens", "ln_vision.weight", "ln_vision.bias"]
    assert not report.unexplained
    assert ours.config.layer_norm_eps == 1e-6
    assert report.settings["layer_norm_eps"] == "1e-06, from its config"
    arguments = inputs()
    mine = ours(**arguments).last_hidden_state
    joint = torch.cat([torch.ones(B, 5, dtype=torch.int64), arguments["attention_mask"]], dim=1)
    other = theirs(**arguments | {"attention_mask": joint}).last_hidden_state
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    assert_same_gradients(ours, mine, theirs, other, report.taken)


def whole_config(library, kind: str, text: str = "opt", **qformer):
    prefix = {"blip2": "Blip2", "instructblip": "InstructBlip", "instructblipvideo": "InstructBlipVideo"}[kind]
    vision = getattr(library, f"{prefix}VisionConfig")(
        hidden_size=20, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    if text == "opt":
        language = library.OPTConfig(
            vocab_size=60,
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            bos_token_id=2,
            eos_token_id=3,
            pad_token_id=1,
        )
    else:
        language = library.T5Config(
            vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2
        )
    return getattr(library, f"{prefix}Config")(
        vision_config=vision.to_dict(),
        qformer_config=getattr(library, f"{prefix}QFormerConfig")(**qformer_settings(**qformer)).to_dict(),
        text_config=language.to_dict(),
        num_query_tokens=5,
        image_token_index=59,
    )


def test_blip2_retrieval_computes_the_same_with_text_and_without():
    library = transformers()
    config = whole_config(library, "blip2", use_qformer_text_input=True)
    config.image_token_index = None
    theirs = randomised(library.Blip2ForImageTextRetrieval(config))
    ours, report = load_qformer(theirs)
    assert (report.layout, report.missing, report.unexplained) == ("blip2", [], [])
    assert report.taken["ln_vision.weight"] == "vision_model.post_layernorm.weight"
    assert ours.config.vision_layer_norm_eps == config.vision_config.layer_norm_eps
    arguments = inputs()
    queries = theirs.query_tokens.expand(B, -1, -1)
    embedded = theirs.embeddings(input_ids=arguments["input_ids"], query_embeds=queries)
    # transformers' Blip2QFormerModel can't take a mask on the image together with text (its shape is that of all rows).
    padded = {name: arguments[name] for name in ("encoder_hidden_states", "encoder_attention_mask")}
    del arguments["encoder_attention_mask"]
    image = {"encoder_hidden_states": arguments["encoder_hidden_states"]}
    joint = torch.cat([torch.ones(B, 5, dtype=torch.int64), arguments["attention_mask"]], dim=1)
    other = theirs.qformer(query_embeds=embedded, query_length=5, attention_mask=joint, **image).last_hidden_state
    mine = ours(**arguments | {"query_embeds": ours.query_tokens.expand(B, -1, -1)}).last_hidden_state
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    assert_same_gradients(ours, mine, theirs, other, report.taken)

    other = theirs.qformer(query_embeds=queries, **padded).last_hidden_state
    mine = ours(query_embeds=ours.query_tokens.expand(B, -1, -1), **padded).last_hidden_state
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)

    other = theirs.qformer(
        query_embeds=theirs.embeddings(input_ids=arguments["input_ids"]),
        query_length=0,
        attention_mask=arguments["attention_mask"],
    ).last_hidden_state
    mine = ours(input_ids=arguments["input_ids"], attention_mask=arguments["attention_mask"]).last_hidden_state
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["blip2", "instructblip"])
@pytest.mark.parametrize("text", ["opt", "t5"])
def test_a_saved_whole_model_is_read_and_accounted_for(kind, text, tmp_path):
    library = transformers()
    name = {"blip2": "Blip2ForConditionalGeneration", "instructblip": "InstructBlipForConditionalGeneration"}[kind]
    theirs = randomised(getattr(library, name)(whole_config(library, kind, text)))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, report = load_qformer(tmp_path)
    assert (report.layout, report.missing, report.unexplained) == (kind, [], [])
    assert ours.config.use_text == (kind == "instructblip")
    images = torch.randn(B, 3, 8, 8)
    seen = theirs.vision_model(images).last_hidden_state
    queries = theirs.query_tokens.expand(B, -1, -1)
    text_inputs = {} if kind == "blip2" else {"input_ids": torch.randint(1, 50, (B, T))}
    other = theirs.qformer(query_embeds=queries, encoder_hidden_states=seen, **text_inputs).last_hidden_state
    raw = []
    hook = theirs.vision_model.post_layernorm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
    theirs.vision_model(images)
    hook.remove()
    mine = ours(image_features=raw[0], **text_inputs).last_hidden_state
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("to", "use_text"), [("blip2", True), ("blip2", False), ("instructblip", True)])
def test_transformers_reads_what_is_written_for_it(to, use_text, tmp_path):
    library = transformers()
    ours = build(replace(DENSE, use_text=use_text, hidden_dropout_prob=0.0))
    save_qformer(ours, tmp_path, to=to)
    cls = {"blip2": library.Blip2QFormerModel, "instructblip": library.InstructBlipQFormerModel}[to]
    theirs, found = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["mismatched_keys"]
    assert {name for name in found["unexpected_keys"] if not name.startswith("embeddings.")} == {
        "query_tokens",
        "vision_model.post_layernorm.weight",
        "vision_model.post_layernorm.bias",
    }
    arguments = inputs()
    del arguments["attention_mask"]
    if to == "blip2":
        del arguments["input_ids"]
    other = theirs.eval()(**arguments).last_hidden_state
    torch.testing.assert_close(ours(**arguments).last_hidden_state, other, rtol=0, atol=1e-5)


def bert(library) -> nn.Module:
    settings = qformer_settings()
    del settings["encoder_hidden_size"]
    return randomised(library.BertModel(library.BertConfig(**settings)))


def test_bert_is_the_text_side():
    library = transformers()
    theirs = bert(library)
    with pytest.raises(ValueError, match=r"lacks query_tokens, .*encoder\.layer\.0\.crossattention"):
        load_qformer(theirs)
    sizes = {"encoder_width": 20, "num_query_tokens": 5, "vocab_size": 52}
    ours, report = load_qformer(theirs, allow_missing=True, query_ffn_from_text=True, **sizes)
    assert not report.unexplained
    assert not any(".experts." in name for name in report.missing)
    assert "added 2 words to 50, each the mean of all" in report.notes
    arguments = {name: inputs()[name] for name in ("input_ids", "attention_mask")}
    other = theirs(**arguments).last_hidden_state
    torch.testing.assert_close(ours(**arguments).last_hidden_state, other, rtol=0, atol=1e-5)
    layer = ours.encoder.layer[1]
    assert torch.equal(layer.experts.dense1.weight, layer.intermediate.dense.weight)
    assert torch.equal(layer.expert_ln.weight, layer.output.LayerNorm.weight)
    with pytest.raises(ValueError, match="query_ffn_from_text is for a BERT"):
        load_qformer(ours, query_ffn_from_text=True)


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_the_text_side_becomes_a_bert(config, tmp_path):
    library = transformers()
    ours = build(config)
    save_qformer(ours, tmp_path / "ours")
    report = convert(tmp_path / "ours", tmp_path / "bert", to="bert")
    assert any(note.startswith("not written, since BERT is a text side alone") for note in report.notes)
    theirs = library.BertModel.from_pretrained(tmp_path / "bert", add_pooling_layer=False).eval()
    arguments = {name: inputs()[name] for name in ("input_ids", "attention_mask")}
    other = theirs(**arguments).last_hidden_state
    torch.testing.assert_close(ours(**arguments).last_hidden_state, other, rtol=0, atol=1e-5)


# Upcycling


@pytest.mark.parametrize(("experts", "beams"), [(2, 2), (3, 3), (4, 3), (3, 5)])
@pytest.mark.parametrize("moe_layers", [None, (0, 1, 2, 3), (1,)], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"weight_type": "one_hot", "residual_from": "parent"}, {"routing": "pre_route"}], ids=str
)
def test_an_upcycled_model_is_equal_at_the_start_when_told_so(experts, beams, moe_layers, settings):
    dense = build(replace(DENSE, hidden_dropout_prob=0.0))
    mixture = upcycle(dense, num_experts=experts, num_beams=beams, moe_layers=moe_layers, equal=True, **settings)
    assert mixture.config.routed_layers == (moe_layers or (2, 3))
    arguments = inputs()
    output = mixture(**arguments)
    torch.testing.assert_close(output.last_hidden_state, dense(**arguments).last_hidden_state, rtol=0, atol=1e-5)
    assert output.expert_route.shape == (B, len(mixture.config.routed_layers))


def test_the_published_routing_changes_an_upcycled_model():
    dense = build(replace(DENSE, hidden_dropout_prob=0.0))
    arguments = inputs()
    difference = upcycle(dense)(**arguments).last_hidden_state - dense(**arguments).last_hidden_state
    assert difference.abs().max() > 0.1


def test_gates_of_an_equal_mixture_learn_once_experts_differ():
    mixture = upcycle(build(replace(DENSE, hidden_dropout_prob=0.0)), equal=True)
    randomised(mixture)(**inputs()).last_hidden_state[:, 0, 0].sum().backward()
    assert all(layer.experts.gate.weight.grad.norm() > 0 for layer in mixture.encoder.layer[2:])


def test_upcycling_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"experts in layers \[2, 3\]"):
        upcycle(build(MIXTURE))
    with pytest.raises(ValueError, match="num_experts is 1"):
        upcycle(build(), num_experts=1)
    with pytest.raises(ValueError, match="moe_layers is empty"):
        upcycle(build(), moe_layers=())
    with pytest.raises(ValueError, match=r"routing 'token', .* is not equal to the dense model"):
        upcycle(build(), equal=True, routing="token")
    with pytest.raises(ValueError, match="merge 'sum' is not equal to the dense model"):
        upcycle(build(), equal=True, merge="sum")


def test_convert_upcycles(tmp_path):
    dense = build(replace(DENSE, hidden_dropout_prob=0.0))
    source = save_qformer(dense, tmp_path / "dense.pth", to="lavis")
    report = convert(source, tmp_path / "mixture", experts=3, beams=4, moe_layers=(1, 3), equal=True)
    assert "made 3 experts of each query feed-forward in layers 1, 3; 4 beams" in report.notes
    mixture = QFormerModel.from_checkpoint(tmp_path / "mixture")
    assert (mixture.config.routed_layers, mixture.config.num_beams) == ((1, 3), 4)
    arguments = inputs()
    expected = dense(**arguments).last_hidden_state
    torch.testing.assert_close(mixture(**arguments).last_hidden_state, expected, rtol=0, atol=1e-5)
    assert Path(tmp_path / "mixture" / "config.json").is_file()


# What is refused before any work is done


@pytest.mark.parametrize("content", [b"", b"hello there", b"\x80\x02garbage", b"PK\x03\x04 cut off"])
def test_a_file_of_another_kind_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "garbage.pth").write_bytes(content)
    with pytest.raises(ValueError, match=r"garbage\.pth is not a torch file, or is damaged$"):
        load_qformer(tmp_path / "garbage.pth")


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("o.txt", {}, r"target is '.*o\.txt'; a weight file ends in"),
        ("out", {"to": "nothing"}, "to is 'nothing'"),
        ("out", {"to": "lavis", "experts": 3}, "experts is 3, and LAVIS has no place for them"),
    ],
)
def test_a_wrong_target_is_refused_before_the_source_is_read(target, options, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        convert(tmp_path / "there is none.pth", tmp_path / target, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_target_where_no_file_can_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is no folder"):
        convert(tmp_path / "there is none.pth", tmp_path / "file" / "model.pth")
    (tmp_path / "folder.pth").mkdir()
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        convert(tmp_path / "there is none.pth", tmp_path / "folder.pth")

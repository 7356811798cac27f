"""Shapes, inputs and options of the Q-Former."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small_qformer
from moe_zero.qformer import QFormerConfig, QFormerModel, importance_loss
from moe_zero.qformer.golden import GoldenCase

SMALL = replace(small_qformer.SMALL, initializer_range=0.12)
B, T, P = 3, 6, 7


def build(**changes) -> QFormerModel:
    return QFormerModel(replace(SMALL, cross_attention_layers=None, **changes))


def inputs(model: QFormerModel, *, batch: int = B, text: int = T) -> dict[str, torch.Tensor]:
    config = model.config
    mask = torch.ones(batch, text, dtype=torch.int64)
    mask[-1:, text // 2 :] = 0
    return {
        "query_embeds": torch.randn(batch, config.num_query_tokens, config.hidden_size),
        "input_ids": torch.randint(config.vocab_size, (batch, text)),
        "attention_mask": mask,
        "encoder_hidden_states": torch.randn(batch, P, config.encoder_width),
        "encoder_attention_mask": torch.ones(batch, P, dtype=torch.int64),
    }


def test_full_size_has_the_names_and_shapes_of_the_recorded_graph():
    graph = json.loads((Path(__file__).parents[1] / "golden" / "seed_qformer_graph.json").read_text())
    with torch.device("meta"):
        model = QFormerModel(QFormerConfig())
    parameters = {name: list(p.shape) for name, p in model.named_parameters()}
    assert parameters == graph["parameters"]
    assert len(parameters) == 385
    assert sum(p.numel() for p in model.parameters()) == graph["num_parameters"] == 242_361_344


@pytest.mark.parametrize(("experts", "beams"), [(2, 2), (2, 4), (3, 3), (3, 6), (4, 2), (8, 8)])
@pytest.mark.parametrize("weight_type", ["ffn_prob", "one_hot"])
def test_any_number_of_experts_and_beams(experts, beams, weight_type):
    model = build(num_experts=experts, num_beams=beams, weight_type=weight_type)
    output = model(**inputs(model), output_hidden_states=True)
    output.last_hidden_state.square().sum().backward()
    assert output.last_hidden_state.shape == (B, SMALL.num_query_tokens + T, SMALL.hidden_size)
    assert output.expert_route.shape == (B, 3)
    assert output.expert_route.min() >= 0
    assert output.expert_route.max() < experts - 1
    assert (output.beam_scores > 0).all()
    assert [len(state) for state in output.hidden_states] == [B, B, B * beams, B * beams, B]
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_wide_beams_find_the_route_that_an_exhaustive_search_finds():
    """With as many beams as routes nothing is dropped, so the best score is the best of all products."""
    model = build(num_experts=3, num_beams=9, moe_layers=(2, 3), weight_type="one_hot", residual_from="parent")
    batch = inputs(model)
    best = model(**batch)
    for route in [(i, j) for i in range(2) for j in range(2)]:
        forced = build(num_experts=2, num_beams=2, moe_layers=(2, 3), weight_type="one_hot", residual_from="parent")
        state = {k: v for k, v in model.state_dict().items() if ".experts.experts." not in k}
        for layer, expert in zip((2, 3), route, strict=True):
            for ours, theirs in ((0, expert), (1, 2)):
                for name in ("dense1.weight", "dense1.bias", "dense2.weight", "dense2.bias"):
                    prefix = f"encoder.layer.{layer}.experts.experts"
                    state[f"{prefix}.{ours}.{name}"] = model.state_dict()[f"{prefix}.{theirs}.{name}"]
        forced.load_state_dict(state)
        output = forced(**batch)
        chosen = (best.expert_route == torch.tensor(route)).all(dim=1)
        torch.testing.assert_close(
            output.last_hidden_state[chosen], best.last_hidden_state[chosen], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("routing", ["token", "sequence"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_routing_without_beams(routing, top_k):
    model = build(routing=routing, top_k=top_k)
    output = model(**inputs(model), output_hidden_states=True)
    (output.last_hidden_state.square().mean() + output.gate_loss).backward()
    assert [len(state) for state in output.hidden_states] == [B] * 5
    assert output.expert_route is None
    assert output.gate_importance.shape == (3, SMALL.num_experts)
    choices = B * (SMALL.num_query_tokens if routing == "token" else 1)
    torch.testing.assert_close(output.gate_importance.sum(1), torch.full((3,), float(choices)))
    assert output.gate_loss > 0
    assert all(model.encoder.layer[i].experts.gate.weight.grad.abs().sum() > 0 for i in (1, 2, 3))


def test_pre_route_follows_the_input():
    model = build(routing="pre_route")
    output = model(**inputs(model))
    output.last_hidden_state.square().mean().backward()
    assert output.expert_route.shape == (B, 3)
    assert model.encoder.layer[2].experts.gate.weight.shape == (SMALL.num_experts - 1, SMALL.hidden_size)
    assert model.encoder.layer[2].experts.gate.weight.grad.abs().sum() > 0


def test_one_expert_is_dense():
    model = build(num_experts=1)
    output = model(**inputs(model))
    assert output.expert_route is None
    assert output.beam_scores is None
    assert output.gate_loss == 0
    assert "encoder.layer.2.experts.dense1.weight" in model.state_dict()


@pytest.mark.parametrize("moe_layers", [(3,), (0,), (1, 3), (0, 1, 2, 3), (0, 1), ()])
def test_any_layers_may_route(moe_layers):
    model = build(moe_layers=moe_layers)
    output = model(**inputs(model))
    assert output.last_hidden_state.shape == (B, SMALL.num_query_tokens + T, SMALL.hidden_size)
    assert (output.expert_route is None) == (not moe_layers)
    if moe_layers:
        assert output.expert_route.shape == (B, len(moe_layers))


def test_equal_experts_give_the_dense_model():
    """Beams of equal experts differ in nothing: the merged output is twice the dense one's last LayerNorm."""
    dense, routed = build(num_experts=1), build(weight_type="one_hot")
    state = {name: t for name, t in dense.state_dict().items() if ".experts." not in name}
    for name, t in routed.state_dict().items():
        if ".experts." in name:
            source = name.replace(".experts.experts.", ".experts.")
            parts = source.split(".")
            source = ".".join(p for i, p in enumerate(parts) if not (p.isdigit() and parts[i - 1] == "experts"))
            state[name] = t if name.endswith("gate.weight") else dense.state_dict()[source]
    routed.load_state_dict(state)
    batch = inputs(dense)
    expected = dense(**batch).last_hidden_state
    torch.testing.assert_close(routed(**batch).last_hidden_state, 2 * expected, atol=1e-4, rtol=1e-4)


def test_queries_alone():
    model = build()
    batch = inputs(model)
    output = model(batch["query_embeds"], encoder_hidden_states=batch["encoder_hidden_states"])
    assert output.last_hidden_state.shape == (B, SMALL.num_query_tokens, SMALL.hidden_size)
    # Text that nobody may look at changes nothing.
    batch["attention_mask"] = torch.zeros(B, T)
    both = model(**batch)
    torch.testing.assert_close(both.last_hidden_state[:, : SMALL.num_query_tokens], output.last_hidden_state)


def test_text_alone():
    model = build()
    batch = inputs(model)
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert output.last_hidden_state.shape == (B, T, SMALL.hidden_size)
    assert output.expert_route is None
    assert output.gate_loss == 0


def test_raw_image_features_are_normalised_and_read_by_the_learned_queries():
    model = build()
    features = torch.randn(B, P, SMALL.encoder_width)
    expected = model(model.query_tokens.expand(B, -1, -1), encoder_hidden_states=model.ln_vision(features))
    torch.testing.assert_close(model(image_features=features).last_hidden_state, expected.last_hidden_state)


def test_mask_over_text_over_all_and_over_pairs_agree():
    model = build()
    batch = inputs(model)
    expected = model(**batch).last_hidden_state
    over_all = torch.cat([torch.ones(B, SMALL.num_query_tokens), batch["attention_mask"]], dim=1)
    for mask in (over_all, over_all[:, None].expand(-1, over_all.shape[1], -1), over_all.bool()):
        torch.testing.assert_close(model(**{**batch, "attention_mask": mask}).last_hidden_state, expected)


def test_a_dropped_image_token_has_no_effect():
    model = build()
    batch = inputs(model)
    batch["encoder_attention_mask"][:, -1] = 0
    expected = model(**batch).last_hidden_state
    batch["encoder_hidden_states"][:, -1] = 100.0
    torch.testing.assert_close(model(**batch).last_hidden_state, expected)


def test_samples_do_not_see_each_other():
    model = build()
    batch = inputs(model)
    expected = model(**batch).last_hidden_state[1:2]
    alone = model(**{name: t[1:2] for name, t in batch.items()}).last_hidden_state
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)


def test_a_nan_sample_spoils_no_other():
    model = build()
    batch = inputs(model)
    expected = model(**batch)
    batch["encoder_hidden_states"][0] = float("nan")
    output = model(**batch)
    torch.testing.assert_close(output.last_hidden_state[1:], expected.last_hidden_state[1:])
    assert output.expert_route.min() >= 0
    assert output.expert_route.max() < SMALL.num_experts - 1


def test_no_samples():
    model = build()
    output = model(**inputs(model, batch=0))
    output.last_hidden_state.sum().backward()
    assert output.last_hidden_state.shape[0] == 0
    assert output.gate_loss == 0


def test_one_query_and_one_token():
    model = build(num_query_tokens=1)
    assert model(**inputs(model, batch=1, text=1)).last_hidden_state.shape == (1, 2, SMALL.hidden_size)


def test_residual_from_parent_differs_where_beams_swap(golden_directory):
    case = GoldenCase.load(golden_directory / "uniroute_e5_b3_padded.safetensors")  # its beams swap
    row = case.model()
    parent = QFormerModel(replace(row.config, residual_from="parent"))
    parent.load_state_dict(row.state_dict())
    assert not torch.allclose(parent(**case.inputs()).last_hidden_state, row(**case.inputs()).last_hidden_state)


def test_residual_from_parent_is_the_row_where_there_is_one_routed_beam():
    row = build(num_beams=2)
    parent = QFormerModel(replace(row.config, residual_from="parent"))
    parent.load_state_dict(row.state_dict())
    batch = inputs(row)
    torch.testing.assert_close(parent(**batch).last_hidden_state, row(**batch).last_hidden_state)


def test_dropout_acts_in_training_only():
    model = build(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    batch = inputs(model)
    assert not torch.equal(model(**batch).last_hidden_state, model(**batch).last_hidden_state)
    model.eval()
    torch.testing.assert_close(model(**batch).last_hidden_state, model(**batch).last_hidden_state, rtol=0, atol=0)


def test_gate_loss_does_not_depend_on_how_the_batch_is_split():
    model = build()
    batch = inputs(model)
    whole = model(**batch)
    parts = [model(**{name: t[part] for name, t in batch.items()}) for part in (slice(0, 1), slice(1, None))]
    importance = sum(part.gate_importance for part in parts)
    torch.testing.assert_close(importance_loss(importance).sum(), whole.gate_loss)


def test_keys_and_values_of_the_image_are_projected_once_per_sample():
    model = build()
    shapes = []
    for layer in model.encoder.layer:
        if layer.crossattention is not None:
            layer.crossattention.self.key.register_forward_hook(lambda _m, args, _out: shapes.append(args[0].shape))
    model(**inputs(model))
    assert shapes == [(B, P, SMALL.encoder_width)] * len(model.config.cross_attention_layers)


@pytest.mark.slow
def test_compiled_model_equals_eager():
    model = build(num_hidden_layers=2, moe_layers=(0, 1))  # beams begin and merge
    batch = inputs(model)
    compiled = torch.compile(model, fullgraph=True)

    def run(function):
        model.zero_grad()
        output = function(**batch, output_hidden_states=True)
        (output.last_hidden_state.square().mean() + output.gate_loss).backward()
        return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    (expected, expected_grads), (output, grads) = run(model), run(compiled)
    for state, expected_state in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=0)
    assert torch.equal(output.expert_route, expected.expert_route)
    torch.testing.assert_close(grads, expected_grads, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_embeds": torch.zeros(B, 5, 23)}, r"query_embeds has shape \(3, 5, 23\).*hidden_size = 24"),
        (
            {"input_ids": torch.zeros(B, 17, dtype=torch.int64)},
            "input_ids has 17 tokens; max_position_embeddings is 16",
        ),
        ({"input_ids": torch.zeros(B, T)}, "input_ids has dtype torch.float32"),
        (
            {"input_ids": torch.zeros(2, T, dtype=torch.int64)},
            "batch sizes differ: query_embeds has 3, input_ids has 2",
        ),
        ({"attention_mask": torch.ones(B, T + 1)}, r"attention_mask has shape \(3, 7\).*\[3, 6\], \[3, 11\]"),
        ({"encoder_hidden_states": torch.zeros(B, P, 19)}, "encoder_hidden_states has shape .*encoder_width = 20"),
        ({"encoder_hidden_states": None, "encoder_attention_mask": None}, "encoder_hidden_states is not given"),
        ({"encoder_attention_mask": torch.ones(B, P + 1)}, r"encoder_attention_mask has shape \(3, 8\)"),
        ({"query_embeds": None, "input_ids": None}, "neither query_embeds nor input_ids"),
        ({"image_features": torch.zeros(B, P, 20)}, "image_features and encoder_hidden_states are both given"),
    ],
)
def test_a_bad_input_is_named(change, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        model(**{**inputs(model), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 25}, "num_attention_heads is 4, which does not divide hidden_size 25"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"moe_layers": (4,)}, "moe_layers names layer 4, but num_hidden_layers is 4"),
        ({"moe_layers": (1, 1)}, "names a layer twice"),
        ({"moe_layers": "all"}, "moe_layers is 'all'"),
        ({"num_beams": 1}, "num_beams is 1; it must be an integer of at least 2"),
        ({"num_experts": 0}, "num_experts is 0"),
        (
            {"routing": "random"},
            "routing is 'random'; it must be one of 'post_route', 'pre_route', 'token', 'sequence'",
        ),
        ({"top_k": 5}, "top_k is 5, but num_experts is 4"),
        ({"weight_type": "prob"}, "weight_type is 'prob'; it must be one of 'ffn_prob', 'scaled_prob', 'one_hot'"),
        ({"residual_from": "beam"}, "residual_from is 'beam'"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0"),
    ],
)
def test_a_bad_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        build(**change)


def test_configuration_survives_a_dictionary():
    assert QFormerConfig.from_dict(json.loads(json.dumps(SMALL.to_dict()))) == SMALL
    with pytest.raises(ValueError, match="unknown Q-Former setting expert_count"):
        QFormerConfig.from_dict({"expert_count": 3})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input_ids": torch.full((B, T), 50)}, "input_ids holds 50; token numbers are 0 to 49"),
        ({"input_ids": torch.full((B, T), -1)}, "input_ids holds -1"),
        ({"input_ids": torch.zeros(B, 0, dtype=torch.long), "attention_mask": None}, r"input_ids has shape \(3, 0\)"),
        ({"attention_mask": torch.full((B, T), -10000.0)}, "attention_mask holds -10000.0; it must be 1"),
        ({"query_embeds": torch.zeros(B, 0, 24)}, r"query_embeds has shape \(3, 0, 24\)"),
        ({"encoder_hidden_states": torch.zeros(B, P, 20, dtype=torch.long)}, "encoder_hidden_states has dtype"),
    ],
)
def test_values_that_would_fail_deep_inside_are_named(change, named):
    model = build()
    with pytest.raises(ValueError, match=named):
        model(**{**inputs(model), **change})


def test_wrong_dtype_of_image_features_and_config_are_named():
    with pytest.raises(ValueError, match=r"image_features has dtype torch\.float64, but the model's weights have"):
        build()(image_features=torch.zeros(B, P, 20, dtype=torch.float64))
    with pytest.raises(TypeError, match="config is a dict; it must be a QFormerConfig"):
        QFormerModel(SMALL.to_dict())

"""Our feed-forward in place of those of other models."""

import copy
import pickle

import pytest
import torch
from torch import nn

from moe_zero import patch, unpatch
from moe_zero.layers import GeluFeedForward, TokenMoE, balancing_loss

transformers = pytest.importorskip("transformers", reason="transformers (extra `hf`) is not installed")

WIDTHS = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}


def bert(**changes):
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **{**WIDTHS, **changes})
    return transformers.BertModel(config), {"input_ids": torch.randint(50, (2, 7))}


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=4, **WIDTHS)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0.0)
    return transformers.GPT2Model(config), {"input_ids": torch.randint(50, (2, 7))}


def blip2_qformer():
    config = transformers.Blip2QFormerConfig(encoder_hidden_size=20, use_qformer_text_input=False, **WIDTHS)
    batch = {"query_embeds": torch.randn(2, 5, 24), "encoder_hidden_states": torch.randn(2, 6, 20)}
    return transformers.Blip2QFormerModel(config), batch


def instructblip_qformer():
    config = transformers.InstructBlipQFormerConfig(vocab_size=50, encoder_hidden_size=20, **WIDTHS)
    batch = {"query_embeds": torch.randn(2, 5, 24), "encoder_hidden_states": torch.randn(2, 6, 20)}
    batch["input_ids"] = torch.randint(50, (2, 7))
    return transformers.InstructBlipQFormerModel(config), batch


MODELS = {"bert": bert, "vit": vit, "gpt2": gpt2, "blip2": blip2_qformer, "instructblip": instructblip_qformer}


def run(model, batch):
    model.zero_grad()
    torch.manual_seed(1)  # dropout
    output = model(**batch)[0]
    output.square().mean().backward()
    return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_models_compute_the_same(name, training):
    model, batch = MODELS[name]()
    model.train(training)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    expected, expected_grads = run(model, batch)
    keys = list(model.state_dict())
    report = patch(model)
    assert report.replaced
    assert not report.left, report
    assert sum(isinstance(m, GeluFeedForward) for m in model.modules()) == len(report.replaced)
    output, grads = run(model, batch)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-4)
    assert list(model.state_dict()) == keys
    assert unpatch(model) == report.replaced
    assert not any(isinstance(m, GeluFeedForward) for m in model.modules())
    restored, _ = run(model, batch)
    torch.testing.assert_close(restored, expected, atol=0, rtol=0)


def test_save_and_load_through_transformers(tmp_path):
    model, batch = bert()
    model.eval()
    patch(model)
    expected = model(**batch)[0]
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**batch)[0], expected, atol=1e-5, rtol=1e-5)
    patch(loaded)
    torch.testing.assert_close(loaded(**batch)[0], expected, atol=1e-6, rtol=1e-6)


def test_patching_twice_replaces_nothing_more():
    model, _ = bert()
    assert len(patch(model).replaced) == 2
    assert patch(model).replaced == []


def test_a_patched_model_is_copied_pickled_and_converted():
    model, batch = bert()
    model.eval()
    patch(model)
    expected = model(**batch)[0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(**batch)[0], expected)
        with torch.no_grad():
            twin.encoder.layer[0].output.dense.weight.zero_()
        assert not torch.allclose(twin(**batch)[0], expected)
    torch.testing.assert_close(model(**batch)[0], expected)
    assert model.double()(**batch)[0].dtype == torch.float64


def test_weights_stay_the_same_objects():
    model, _ = gpt2()
    before = dict(model.named_parameters())
    patch(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_weights_changed_while_patched_are_there_after_unpatching():
    model, batch = bert()
    model.eval()
    patch(model)
    with torch.no_grad():
        model.encoder.layer[1].intermediate.dense.weight.mul_(2)
    expected = model(**batch)[0]
    unpatch(model)
    torch.testing.assert_close(model(**batch)[0], expected, atol=1e-6, rtol=1e-6)


def test_hooks_on_a_replaced_module_are_called_and_can_be_removed():
    model, batch = vit()
    calls = []
    handle = model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1)) if hasattr(model, "layers") else None
    if handle is None:
        handle = model.encoder.layer[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    assert len(patch(model).replaced) == 2
    model(**batch)
    assert calls == [1]
    handle.remove()
    model(**batch)
    assert calls == [1]


def test_a_module_with_hooks_inside_is_left_alone():
    model, _ = bert()
    model.encoder.layer[0].intermediate.dense.register_forward_hook(lambda *_: None)
    report = patch(model)
    assert report.replaced == ["encoder.layer.1.intermediate"]
    assert "hooks" in report.left["encoder.layer.0.intermediate"]


class Odd(nn.Module):
    """Two fitting products, and something else between them."""

    def __init__(self, function):
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, 12), nn.Linear(12, 8), function

    def forward(self, x):
        return self.down(self.function(self.up(x)))


class WithResidual(Odd):
    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Odd(torch.relu), "something else"),
        (Odd(lambda x: x * torch.sigmoid(1.702 * x)), "something else"),  # quick GELU
        (Odd(nn.Sequential(nn.GELU(), nn.Dropout(0.1))), "drops activations"),
        (WithResidual(nn.GELU()), "something else"),
        (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 8)), "something else"),
        (Odd(nn.GELU()).to("meta"), "meta device"),
        (nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)]), "cannot be run"),
    ],
)
def test_what_only_looks_like_a_feed_forward_is_left_alone(module, reason):
    report = patch(nn.ModuleDict({"ffn": module}))
    assert report.replaced == []
    assert reason in report.left["ffn"]


@pytest.mark.parametrize(("function", "approximate"), [(nn.GELU(), "none"), (nn.GELU("tanh"), "tanh")])
def test_the_kind_of_gelu_is_found_out(function, approximate):
    model = nn.ModuleDict({"ffn": Odd(function)})
    assert patch(model).replaced == ["ffn"]
    assert model["ffn"].approximate == approximate


def test_half_precision_is_kept():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))).bfloat16()
    expected = model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert patch(model).replaced == ["0"]
    output = model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected)


def test_selection_by_class_and_by_name():
    model, _ = bert()
    assert patch(model, names=["encoder.layer.1.*"]).replaced == ["encoder.layer.1.intermediate"]
    unpatch(model)
    assert len(patch(model, classes=["BertLayer"]).replaced) == 2
    unpatch(model)
    with pytest.raises(ValueError, match=r"matches none of the model's feed-forwards; these are encoder\.layer\.0"):
        patch(model, classes=["ViTLayer"])


def test_a_patched_model_compiles_whole():
    model = nn.Sequential(Odd(nn.GELU()))
    patch(model)
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_upcycled_models_start_as_the_dense_ones(name, experts, top_k, training):
    model, batch = MODELS[name]()
    model.train(training)
    expected, _ = run(model, batch)
    keys = list(model.state_dict())
    report = patch(model, experts=experts, top_k=top_k)
    assert sum(isinstance(m, TokenMoE) for m in model.modules()) == len(report.replaced) > 0
    output, grads = run(model, batch)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert any("experts" in name for name in grads)
    model(**batch)
    assert torch.isfinite(balancing_loss(model))
    assert patch(model).replaced == []
    assert unpatch(model) == report.replaced
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(run(model, batch)[0], expected, atol=0, rtol=0)


def test_an_upcycled_model_is_saved_and_loaded(tmp_path):
    model, batch = bert()
    model.eval()
    patch(model, experts=3, top_k=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    expected = model(**batch)[0]
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel(model.config).eval()
    patch(loaded, experts=3, top_k=2)
    from safetensors.torch import load_file

    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(loaded(**batch)[0], expected, atol=1e-6, rtol=1e-6)


def test_bad_numbers_of_experts_are_named():
    model, _ = bert()
    with pytest.raises(ValueError, match="top_k is 3; it must be between 1 and experts, 2"):
        patch(model, experts=2, top_k=3)
    with pytest.raises(ValueError, match="top_k is 2, but experts is not given"):
        patch(model, top_k=2)


def test_a_pattern_alone_is_one_pattern():
    model, _ = bert()
    assert patch(model, names="encoder.layer.1.*").replaced == ["encoder.layer.1.intermediate"]
    with pytest.raises(ValueError, match=r"patched already are encoder\.layer\.1\.intermediate \(unpatch first\)"):
        patch(model, names="encoder.layer.1.*", experts=2)

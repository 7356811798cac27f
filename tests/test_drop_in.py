"""``moe_zero.patch`` on whole models; its parts have tests of their own."""

import pytest
import torch

import moe_zero

transformers = pytest.importorskip("transformers", reason="transformers (extra `hf`) is not installed")


@pytest.fixture
def blip2():
    widths = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.Blip2Config(
        vision_config={**widths, "image_size": 8, "patch_size": 4},
        qformer_config={**widths, "encoder_hidden_size": 16},
        text_config={
            "model_type": "opt",
            "vocab_size": 40,
            "hidden_size": 16,
            "word_embed_proj_dim": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        num_query_tokens=4,
        image_token_index=39,
    )
    return transformers.Blip2ForConditionalGeneration(config).eval()


def inputs():
    ids = torch.cat([torch.full((2, 4), 39), torch.randint(5, 38, (2, 3))], dim=1)
    return {"pixel_values": torch.randn(2, 3, 8, 8), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_whole_model_gets_our_qformer(blip2):
    batch = inputs()
    expected = blip2(**batch).logits
    assert moe_zero.patch(blip2).replaced == ["qformer"]
    torch.testing.assert_close(blip2(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="cannot be put back; load the model again"):
        moe_zero.unpatch(blip2)


def test_a_whole_model_gets_experts(blip2):
    batch = inputs()
    expected = blip2(**batch).logits
    moe_zero.patch(blip2, experts=4, num_beams=3, equal=True)
    torch.testing.assert_close(blip2(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    assert any("experts.experts.3." in name for name, _ in blip2.qformer.named_parameters())


def test_names_ask_for_feed_forwards_in_a_whole_model_too(blip2):
    batch = inputs()
    expected = blip2(**batch).logits
    report = moe_zero.patch(blip2, names=["qformer.*", "vision_model.*"])
    assert len(report.replaced) == 4
    torch.testing.assert_close(blip2(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    assert moe_zero.unpatch(blip2) == report.replaced


def test_bad_arguments_are_named(blip2):
    with pytest.raises(ValueError, match="top_k is 2, but a Q-Former's experts are routed by beams"):
        moe_zero.patch(blip2, experts=4, top_k=2)
    with pytest.raises(ValueError, match="num_beams is of the Q-Former in a whole BLIP-2"):
        moe_zero.patch(torch.nn.Linear(2, 2), num_beams=3)

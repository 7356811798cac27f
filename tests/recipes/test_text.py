import pytest
import torch

from moe_zero.qformer import QFormerModel
from moe_zero.recipes.config import TrainConfig
from moe_zero.recipes.tokenizer import CaptionTokenizer, minilm_folder
from moe_zero.recipes.warm_start import copy_bert


def test_tokenizer_pads_cuts_and_knows_dec():
    tokenizer = CaptionTokenizer(6)
    assert len(tokenizer) == 30523 and tokenizer.dec_id == 30522
    ids, mask = tokenizer(["a cat", "a very long sentence about one small cat"])
    assert ids.shape == mask.shape == (2, 6)
    assert ids[0].tolist() == [101, 1037, 4937, 102, 0, 0] and mask[0].tolist() == [1, 1, 1, 1, 0, 0]
    assert ids[1, 0] == 101 and ids[1, -1] == 102 and mask[1].all()
    assert tokenizer(["a cat"], length=9)[0].shape == (1, 9)


@torch.no_grad()
def test_text_path_of_the_small_preset_is_minilm():
    transformers = pytest.importorskip("transformers")
    model = QFormerModel(TrainConfig().qformer(64))
    left = copy_bert(model, minilm_folder() / "model.safetensors")
    assert all(
        "crossattention" in name or "gate" in name or name.split(".")[0] in ("query_tokens", "ln_vision")
        for name in left
    )
    bert = transformers.BertModel.from_pretrained(minilm_folder()).eval()
    ids, mask = CaptionTokenizer(16)(["a cup of coffee on a table", "a cat"])
    ours = model(input_ids=ids, attention_mask=mask).last_hidden_state
    theirs = bert(input_ids=ids, attention_mask=mask).last_hidden_state
    assert (ours - theirs)[mask.bool()].abs().max() < 1e-4


@torch.no_grad()
def test_every_expert_starts_as_the_text_feed_forward():
    model = QFormerModel(TrainConfig().qformer(64))
    copy_bert(model, minilm_folder() / "model.safetensors")
    layer = model.encoder.layer[4]
    for expert in layer.experts.experts:
        assert torch.equal(expert.dense1.weight, layer.intermediate.dense.weight)
        assert torch.equal(expert.dense2.bias, layer.output.dense.bias)
    assert torch.equal(layer.expert_ln.weight, layer.output.LayerNorm.weight)


def test_other_widths_are_refused():
    model = QFormerModel(TrainConfig(preset="seed", num_hidden_layers=1).qformer(8))
    with pytest.raises(ValueError, match=r"has shape \(30523, 768\), but .* has \(30523, 384\)"):
        copy_bert(model, minilm_folder() / "model.safetensors")

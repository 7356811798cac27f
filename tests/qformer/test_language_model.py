"""Text that is read word by word after the queries: masks, caches, the loss, the head in checkpoints."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_zero.qformer import QFormerConfig, QFormerModel, load_qformer, save_qformer, upcycle
from moe_zero.qformer.checkpoint import convert, export_state_dict
from moe_zero.qformer.objectives import LABEL_SMOOTHING, QFormerPretraining
from moe_zero.qformer.reference import qformer_reference
from small_qformer import WIDER

_SCRIPT = Path(__file__).with_name("language_model_on_ranks.py")
_SPEC = importlib.util.spec_from_file_location("language_model_on_ranks", _SCRIPT)
on_ranks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(on_ranks)

B, Q, T, P = 3, 5, 7, 6
SMALL = replace(WIDER, lm_head=True)
KINDS = {
    "beams": SMALL,
    "four beams from layer 1 to 2": replace(SMALL, moe_layers=(1, 2), num_beams=4),
    "one routed layer": replace(SMALL, moe_layers=(1,)),
    "mean, parent": replace(SMALL, moe_layers=(0, 1, 2), merge="mean", residual_from="parent"),
    "token": replace(SMALL, routing="token"),
    "dense": replace(SMALL, num_experts=1),
}


def made(config: QFormerConfig = SMALL) -> tuple[QFormerModel, dict]:
    """In fp64: how fp32 rounds depends on the processor and on the number of rows in a product."""
    torch.manual_seed(0)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 5:] = 0
    return QFormerModel(config).double(), {
        "image_features": torch.randn(B, P, 20, dtype=torch.float64),
        "input_ids": torch.randint(1, 50, (B, T)),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_text_after_a_cache_is_what_it_is_in_one_call(config):
    model, inputs = made(config)
    whole = model(**inputs, causal=True)
    queries = model(image_features=inputs["image_features"], use_cache=True)
    assert (whole.last_hidden_state[:, :Q] - queries.last_hidden_state).abs().max() < 1e-11
    expected = whole.last_hidden_state[:, Q:]
    text = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], cache=queries.cache)
    assert (text.last_hidden_state - expected).abs().max() < 1e-11

    cache, rows = queries.cache, []
    for word in inputs["input_ids"].split([1, 2, 1, 3], dim=1):
        output = model(input_ids=word, cache=cache, use_cache=True)
        cache = output.cache
        rows.append(output.last_hidden_state)
    assert cache.num_tokens == T
    kept = inputs["attention_mask"].bool()
    assert (torch.cat(rows, dim=1) - expected)[kept].abs().max() < 1e-11


def test_a_cache_after_queries_and_text_goes_on():
    model, inputs = made()
    expected = model(**inputs, causal=True).last_hidden_state[:, Q + 4 :]
    inputs["attention_mask"] = None
    ids = inputs.pop("input_ids")
    start = model(**inputs, input_ids=ids[:, :4], causal=True, use_cache=True)
    following = model(input_ids=ids[:, 4:], cache=start.cache).last_hidden_state
    assert (following - expected)[[0, 2]].abs().max() < 1e-11  # text 1 had padding


def test_later_words_and_text_for_the_queries_are_unseen():
    model, inputs = made()
    before = model(**inputs, causal=True).last_hidden_state
    inputs["input_ids"][:, 3:] = inputs["input_ids"][:, 3:] % 49 + 1
    after = model(**inputs, causal=True).last_hidden_state
    assert torch.equal(before[:, : Q + 3], after[:, : Q + 3])
    assert not torch.equal(before[:, Q + 3 :], after[:, Q + 3 :])


def test_samples_of_a_cache_are_chosen_and_repeated():
    model, inputs = made()
    cache = model(image_features=inputs["image_features"], use_cache=True).cache
    expected = model(input_ids=inputs["input_ids"], cache=cache).last_hidden_state
    chosen = torch.tensor([2, 0, 0, 1])
    again = model(input_ids=inputs["input_ids"][chosen], cache=cache.select(chosen)).last_hidden_state
    assert (again - expected[chosen]).abs().max() < 1e-11
    assert cache.repeat_interleave(2).batch == 2 * B


def plain_loss(model: QFormerPretraining, batch: dict) -> torch.Tensor:
    """The loss written out word by word, on the published order of operations, queries and text in one pass."""
    qformer, ids, mask = model.qformer, batch["input_ids"].clone(), batch["attention_mask"]
    ids[:, 0] = model.start_id
    size, length = ids.shape
    queries = qformer.query_tokens.expand(size, -1, -1)
    count = queries.shape[1]
    keep = torch.zeros(size, count + length, count + length)
    for sample in range(size):
        for looking in range(count + length):
            for seen in range(count + length):
                if seen < count:
                    keep[sample, looking, seen] = 1
                elif looking >= seen:
                    keep[sample, looking, seen] = mask[sample, seen - count]
    image = qformer.ln_vision(batch["image_features"])
    rows = qformer_reference(qformer, queries, ids, keep, image).last_hidden_state[:, count:]
    head = qformer.cls.predictions
    transformed = head.transform.LayerNorm(torch.nn.functional.gelu(head.transform.dense(rows)))
    scores = (transformed @ qformer.embeddings.word_embeddings.weight.T + head.bias).log_softmax(-1)
    terms = []
    for sample in range(size):
        for place in range(length - 1):
            if mask[sample, place + 1]:
                row = scores[sample, place]
                right = row[ids[sample, place + 1]]
                terms.append(-(1 - LABEL_SMOOTHING) * right - LABEL_SMOOTHING * row.mean())
    return torch.stack(terms).mean()


def test_the_loss_and_its_gradients_are_those_of_the_formula():
    """Float64, against the reference; the contrastive part is taken off by its own model."""
    model, batch = on_ranks.make().double(), on_ranks.batch()
    batch["image_features"] = batch["image_features"].double()
    losses = model(**batch)
    plain = plain_loss(model, batch)
    assert abs(losses.lm - plain.detach()) < 1e-6  # logits are fp32 in our loss, whatever the model

    parameters = {n: p for n, p in model.named_parameters() if n.startswith("qformer.")}
    expected = torch.autograd.grad(plain, list(parameters.values()), allow_unused=True)
    cache = model.qformer(image_features=batch["image_features"], use_cache=True).cache
    ours, _ = model._caption_loss(cache, batch["input_ids"], batch["attention_mask"])
    found = torch.autograd.grad(ours, list(parameters.values()), allow_unused=True)
    for name, one, other in zip(parameters, found, expected, strict=True):
        zero = torch.zeros_like(parameters[name])
        one, other = (zero if x is None else x for x in (one, other))
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-8, name
    assert found[list(parameters).index("qformer.query_tokens")].norm() > 0


def test_objectives_without_words_have_no_head():
    model = on_ranks.make(objectives=("itc", "itm"))
    assert not any("cls" in name for name, _ in model.named_parameters())
    with pytest.raises(
        ValueError, match=r"task 'look' needs a language-modelling head, but objectives is \['itc', 'itm'\]"
    ):
        model(image_features=on_ranks.batch()["image_features"], task="look")


@pytest.mark.distributed
def test_sharded_ranks_train_with_the_losses_of_one_process(results_of_ranks):
    """Three optimizer steps under ZeRO-3: one unsharded process, one sharded, two."""
    expected = on_ranks.losses_of_steps(sharded=False)
    alone = on_ranks.losses_of_steps(sharded=True)
    for found in (alone, results_of_ranks(_SCRIPT, 2)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# The head in checkpoints


@pytest.mark.parametrize("layout", ["moe-zero", "published", "lavis", "bert"])
def test_the_head_goes_into_checkpoints_and_comes_back(layout, tmp_path):
    model, inputs = made(replace(SMALL, num_experts=1, moe_layers=()))
    state = export_state_dict(model, layout)
    name = {"moe-zero": "cls", "bert": "cls"}.get(layout, "Qformer.cls") + ".predictions"
    assert state[f"{name}.bias"].shape == (50,)
    words = next(key for key in state if key.endswith("word_embeddings.weight"))
    state |= {f"{name}.decoder.weight": state[words].clone(), f"{name}.decoder.bias": state[f"{name}.bias"].clone()}
    given = {"num_attention_heads": 2, "query_ffn_from_text": True} if layout == "bert" else {"num_attention_heads": 2}
    loaded, report = load_qformer(state, allow_missing=layout == "bert", encoder_width=20, **given)
    assert loaded.config.lm_head
    assert report.left[f"{name}.decoder.weight"] == f"a copy of {words}"
    ids = inputs["input_ids"]
    expected, found = (m.next_word_logits(m(input_ids=ids).last_hidden_state) for m in (model.eval(), loaded))
    torch.testing.assert_close(found, expected)
    without, report = load_qformer(state, allow_missing=layout == "bert", encoder_width=20, lm_head=False, **given)
    assert not without.config.lm_head
    assert report.left[f"{name}.transform.dense.weight"] == "the language-modelling head"


def test_a_head_that_is_not_tied_is_not_taken_in_silence():
    state = export_state_dict(made()[0], "published")
    state["Qformer.cls.predictions.decoder.weight"] = torch.randn(50, 32)
    with pytest.raises(ValueError, match=r"nothing is known of, Qformer\.cls\.predictions\.decoder\.weight"):
        load_qformer(state, num_beams=3, num_attention_heads=2)


def test_transformers_has_no_place_for_the_head(tmp_path):
    model, _ = made(replace(SMALL, num_experts=1, moe_layers=()))
    save_qformer(model, tmp_path / "ours")
    report = convert(tmp_path / "ours", tmp_path / "theirs", to="blip2")
    assert "no place for it: the language-modelling head" in str(report)
    assert not QFormerModel.from_checkpoint(tmp_path / "theirs").config.lm_head


def test_more_words_and_more_experts_keep_the_head():
    model, inputs = made(replace(SMALL, num_experts=1, moe_layers=()))
    wider, _ = load_qformer(model, vocab_size=52)
    assert wider.cls.predictions.bias.shape == (52,)
    mixture = upcycle(model.eval(), num_experts=3, num_beams=3, equal=True)
    expected, found = (m.next_word_logits(m(**inputs, causal=True).last_hidden_state[:, Q:]) for m in (model, mixture))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_cache": True}, "needs causal=True"),
        ({"image_features": None, "use_cache": True}, "needs queries"),
        ({"attention_mask": torch.ones(B, 4), "causal": True}, r"attention_mask has shape \(3, 4\)"),
    ],
)
def test_wrong_calls_are_named(change, named):
    model, inputs = made()
    with pytest.raises(ValueError, match=named):
        model(**{**inputs, **change})


def test_wrong_calls_with_a_cache_are_named():
    model, inputs = made()
    cache = model(image_features=inputs["image_features"], use_cache=True).cache
    with pytest.raises(ValueError, match="pass input_ids alone"):
        model(**inputs, cache=cache)
    with pytest.raises(ValueError, match="input_ids has 2, cache has 3"):
        model(input_ids=inputs["input_ids"][:2], cache=cache)
    with pytest.raises(ValueError, match=r"has 17 tokens; max_position_embeddings is 16"):
        model(input_ids=torch.ones(B, 17, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="no language-modelling head"):
        made(replace(SMALL, lm_head=False))[0].next_word_logits(torch.zeros(1, 32))
    with pytest.raises(ValueError, match="lm_head is True, but use_text is False"):
        replace(SMALL, use_text=False)

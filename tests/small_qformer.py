"""Q-Formers that are small enough for tests: two layers look at the image, the upper ones route."""

from dataclasses import replace

from moe_zero.qformer import QFormerConfig

SMALL = QFormerConfig(
    hidden_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=40,
    encoder_width=20,
    vocab_size=50,
    max_position_embeddings=16,
    num_query_tokens=5,
    moe_layers=(1, 2, 3),
    num_experts=4,
    num_beams=3,
    initializer_range=0.3,
)
WIDER = replace(SMALL, hidden_size=32, num_attention_heads=2, intermediate_size=48, moe_layers=(2, 3))

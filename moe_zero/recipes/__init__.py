"""The main job: train a Q-Former on photographs and captions, evaluate retrieval, look at the result.

Read in this order: `config` (every option), `data` and `photographs` (what is trained on), `crops`, `encoders` and
`features` (pictures to tokens, once), `tokenizer` and `warm_start` (the text side), `train` (the loop),
`retrieval` and `plots` (what came out). The objectives are `moe_zero.qformer.objectives`.
"""

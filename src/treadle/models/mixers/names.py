"""Names of the kinds of attention; each is a key of ``MIXERS``."""

FUSED = "attention_qkv"  # queries, keys and values are one matrix
BLOCK_CONVOLVED = "attention_block_convolved"  # between convolutions within a drafted block
SHARED = "attention_shared"  # keys and values are another layer's
KEYS_ALONE = "attention_keys"  # values are the keys: there is no matrix for them
GATE = "attention_gate"  # each head's queries are followed by a gate of its output
SOFTPLUS = "attention_softplus"  # a matrix makes a gate of the output, used through softplus
SOFTPLUS_HEADS = "attention_softplus_heads"  # one gate value per head, used through softplus
SIGMOID_HEADS = "attention_sigmoid"  # one gate value per head, used through sigmoid
SIGMOID_FUSED = "attention_qkv_sigmoid"  # SIGMOID_HEADS with one matrix of queries, keys and values
OWN_DISTANCES = "attention_distances"  # the layer has its own relative bias
SINKS = "attention_sinks"  # the sinks are required
SINKS_FUSED = "attention_qkv_sinks"  # SINKS with one matrix of queries, keys and values
POST_NORM = "attention_post_norm"  # a norm after it, and none before
HEAD_NORMS = "attention_head_norms"  # q/k norms have separate weights for each head
RELATIVE = "attention_relative"  # each query makes biases of its scores by distance
BLOCKS = "attention_blocks"  # attention to blocks that an indexer chooses for each key head
GATE_INDEXED = "attention_gate_indexed"  # attention to keys that an indexer chooses
ROWS = "rows"  # attention to one row of each of the last tokens
ROWS_AND_UNITS = "rows_units"  # ROWS, and to rows that stand for units of earlier tokens
ROWS_AND_CHOSEN_UNITS = "rows_units_indexed"  # ROWS, and to units that an indexer chooses
INDEXED = "latent_indexed"  # latent attention to keys that an indexer chooses
POOLED = "latent_pooled"  # latent attention to units of keys that an indexer chooses
INDEX_SHARED = "latent_index_shared"  # latent attention to an earlier indexer's choice

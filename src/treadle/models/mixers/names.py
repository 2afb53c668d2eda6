"""What the kinds of attention are called: each is a row of ``MIXERS``."""

FUSED = "attention_qkv"  # queries, keys and values are one matrix
SHARED = "attention_shared"  # keys and values are another layer's
KEYS_ALONE = "attention_keys"  # there is no matrix for values
GATE = "attention_gate"  # behind each head's queries there is a gate of its output
SOFTPLUS = "attention_softplus"  # a matrix makes a gate, of which the softplus counts
SOFTPLUS_HEADS = "attention_softplus_heads"  # one value for each head
SIGMOID_HEADS = "attention_sigmoid"  # the same, of which the sigmoid counts
OWN_DISTANCES = "attention_distances"  # scores have numbers of its own added by distance
SINKS, SINKS_FUSED = "attention_sinks", "attention_qkv_sinks"  # none is without sinks
BEHIND = "attention_behind"  # a norm of what it gives, and none of what it reads
HEAD_NORMS = "attention_head_norms"  # each head has weights of its own in q/k norms

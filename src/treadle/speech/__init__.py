"""Models that write down what they hear: an encoder of sound, and a decoder that attends to it."""

"""Pictures and sound: from pixels and samples to rows that a decoder reads in place of tokens."""

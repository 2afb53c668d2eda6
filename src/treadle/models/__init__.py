"""Models: configuration, traits of architectures, and graphs of ops."""

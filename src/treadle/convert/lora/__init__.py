"""LoRA adapters: of PEFT and of GGUF."""

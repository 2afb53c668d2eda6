"""LoRA adapters in PEFT and GGUF form."""

"""LoRA adapters in PEFT and GGUF form, for models in either form.

::

    lora.py             open, load and write adapters
    peft.py             PEFT folders: adapter_config.json and adapter_model.safetensors
    peft_modules.py     transformers' module names, mapped to GGUF matrices
    peft_experts.py     adapters with a module per expert
    peft_parameters.py  adapters of all experts in one parameter
    fused.py            matrices that the model has fused or split
    tasks.py            task adapters inside a model's folder
"""

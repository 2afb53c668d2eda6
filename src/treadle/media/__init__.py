"""Pictures and sound: from pixels and samples to rows that a decoder reads in place of tokens.

::

                        -- from a source to pixels or samples --
    source.py               reads a picture or sound from a path, bytes, URL or array
    kinds.py                "image" and "audio", their words, types of message parts
    limits.py               limits of size, length and number
    file_formats.py         tells a file's format from its first bytes
    data_urls.py            base64 and ``data:`` URLs
    local_path.py           paths and ``file://`` URLs
    address_policy.py       rules for fetching from http(s) addresses
    addresses.py            fetches from them
    public_addresses.py     tells public IP addresses from others
    picture_header.py       a picture's size from its file's header
    picture_file.py         decodes picture files (Pillow)
    picture_arrays.py       arrays of pixels as uint8 RGB
    sound_file.py           decodes sound files
    sound_stream.py         decodes sounds of any length, block by block
    sound_process.py        the process that decodes a compressed sound
    sound_buffer.py         collects samples at 16 kHz
    wav.py                  reads WAV files
    resample.py             changes the sample rate
                        -- from pixels or samples to a tower's inputs --
    family.py               MediaFamily: the base of all projector families
    picture_family.py       the base of families for pictures
    sound_family.py         the base of families for sounds
    whisper_family.py       the base of families with Whisper's encoder
    families/               one module for each projector family
    pixels.py               resizes, normalises, cuts into patches
    tiles.py                cuts a picture into tiles
    mel.py                  log-mel spectrograms
    mel_input.py            a sound's frames, computed when a tower reads them
    convolutions.py         convolutions as matrix products (im2col)
    prepared.py             PreparedMedia: a picture or sound, ready for its tower
    marks.py                replaces a prompt's marks by media rows
                        -- projector files --
    projector.py            Projector: encodes prepared media
    tower_engine.py         runs a tower's plans on a device
    clip_config.py          keys and tensors of a projector file
    hf_projector.py         those of a Hugging Face folder
    projector_source.py     a folder's parts for the converter to GGUF
    llamacpp_projectors.py  differences from llama.cpp's reading of projector files
    unsupported.py          projector types that are not supported
"""

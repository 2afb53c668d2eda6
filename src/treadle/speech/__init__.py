"""Speech recognition (Whisper): an encoder of sound, and a decoder that attends to its states.

::

                           -- the model --
    model.py               SpeechModel: opens a file, encodes windows, makes decoder batches
    read.py                a file's keys and tensors as configurations
    config.py              sizes and special tokens
    encoder.py             runs the encoder
    batch.py               EncodedWindow and DecoderBatch
    languages.py           language codes and names
    warm.py                compiles all plans in advance
                           -- transcription --
    settings.py            TranscribeSettings
    transcribe.py          the loop over windows
    sample_buffer.py       the part of a sound that is in memory
    voice_activity.py      finds the parts with speech
    window_decoding.py     greedy, sampled and beam decoding of windows
    token_rules.py         forbidden tokens, and the order of timestamps
    repetition.py          detects repeated text
    window_text.py         the result of one attempt, and its quality
    window_segments.py     cuts a window's ids at timestamps
                           -- words and results --
    alignment.py           cross-attention weights
    alignment_heads.py     heads whose weights follow the words
    word_times.py          times of words from these weights
    words.py               cuts ids into words
    transcript.py          Transcript, its segments and words
    transcript_formats.py  text, subtitles, JSON
    transcription.py       Transcription: results as an iterator
"""

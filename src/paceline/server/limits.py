"""Size limits of requests and replies, which hold for every client."""

from __future__ import annotations

# JSON bodies. Parsing holds the GIL throughout and so blocks the event loop: with these limits the slowest body of
# 4 MiB takes less than 50 ms.
MAX_VALUES = 2**18  # commas, as an estimate of the values in lists and objects
MAX_PARTS = 2**15  # brackets, braces and colons: lists, objects and their fields

# Fields. Stop strings and the like cost time in every round, so the limits are lower than those of SamplingParams.
MAX_FIELDS = 100  # per object
MAX_PROMPTS = 2**12
MAX_MESSAGES = 2**12
MAX_CONTENT_PARTS = 2**12  # per message
MAX_TOOLS = 2**9
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 2**12  # over all stop strings
MAX_STOP_TOKEN_IDS = 2**10
MAX_ALLOWED_TOKEN_IDS = 2**16  # checked one by one: 13 ms
MAX_LOGIT_BIAS = 2**10  # entries
MAX_METADATA = 16  # entries of a request's metadata, as OpenAI's
MAX_METADATA_KEY = 64  # characters
MAX_LABEL = 512  # characters of a name or label, which the log may repeat

# Replies.
MAX_LOGPROB_ENTRIES = 2**20  # tokens and top log-probabilities: 100 MB while they are collected

MAX_EMBEDDINGS = 2**11  # texts per request, the same as OpenAI's
MAX_EMBEDDING_NUMBERS = 2**21  # 40 MB of JSON

# Error responses.
MAX_FAULTS = 10  # per response
MAX_SHOWN = 100  # characters shown of a field's name or value
MAX_FAULT = 300  # characters per invalid field
MAX_MESSAGE = 3000  # characters of the whole message

# Stored files and batches, per owner.
MAX_FILES = 2**10
MAX_FILES_BYTES = 2**30  # total size of one owner's files; also the limit for one batch's answers
MAX_BATCHES = 2**10
MAX_OPEN_BATCHES = 2**6  # batches that have not ended
MAX_BATCH_LINES = 50_000  # the same as OpenAI's

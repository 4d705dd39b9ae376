"""How much one request may hold, whoever sends it: what lies beyond is refused before it is looked at item by item."""

from __future__ import annotations

# Of a body as JSON. Reading one holds Python's lock from beginning to end, and the event loop waits as long: these keep
# the worst body of 4 MiB below 50 ms.
MAX_VALUES = 2**18  # commas: the values of lists and objects, nearly
MAX_PARTS = 2**15  # brackets, braces and colons: lists, objects and their fields

# Of its fields. Stop strings and the like are paid for round by round, so fewer may come than SamplingParams takes.
MAX_FIELDS = 100  # of one object of the API
MAX_PROMPTS = 2**12
MAX_MESSAGES = 2**12
MAX_CONTENT_PARTS = 2**12  # of one message
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 2**12  # of all stop strings together
MAX_STOP_TOKEN_IDS = 2**10
MAX_ALLOWED_TOKEN_IDS = 2**16  # checked one by one: 13 ms
MAX_LOGIT_BIAS = 2**10  # entries
MAX_LABEL = 512  # characters of a name or a label, which may be repeated in the log

# Of a reply.
MAX_LOGPROB_ENTRIES = 2**20  # tokens and the likely ones beside them: 100 MB while they are collected

# Of an answer that is no success.
MAX_FAULTS = 10  # named in one answer
MAX_SHOWN = 100  # characters of a field's name or value
MAX_FAULT = 300  # characters of what is wrong with one field
MAX_MESSAGE = 3000  # characters of it all

# Of files and batches that are kept, for each owner.
MAX_FILES = 2**10
MAX_FILES_BYTES = 2**30  # of all of them; one batch's answers, too
MAX_BATCHES = 2**10
MAX_OPEN_BATCHES = 2**6  # have not ended
MAX_BATCH_LINES = 50_000  # as OpenAI's

"""Prompts that come with paceline, for the demo, for ``verify`` and for benchmarks.

COPYING: the answer repeats much of the prompt (rewriting, correcting, extracting, editing code), where n-gram drafts
    work best. OPEN: questions whose answer does not stand in the prompt.
"""

from __future__ import annotations

_LETTER = (
    "Dear Ms. Okafor, thank you for your order of twelve oak chairs. The chairs will be delivered on Tuesday, the "
    "ninth of March, between ten and noon. Please keep the side entrance of the building free. Yours, Carpenter & Sons"
)
_REPORT = (
    "The river Aven rises in the hills above Melk. It flows through three lakes before it reaches the plain. In spring "
    "the melting snow raises the river by two metres. In summer the river is so low that children walk across it."
)
_CODE = (
    "def average(numbers):\n    total = 0\n    for number in numbers:\n        total = total + number\n"
    "    return total / len(numbers)\n"
)
_CLASS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n"
)
_LIST = (
    "- flour, 500 grams\n- butter, 250 grams\n- sugar, 200 grams\n- eggs, 4\n- vanilla, 1 stick\n- salt, a pinch\n"
    "- milk, 100 millilitres"
)
_TALK = (
    "Anna: The printer on the second floor is out of paper again. Ben: I ordered paper on Monday, it should arrive "
    "today. Anna: Good. Then the meeting minutes can wait until this afternoon. Ben: I will print them at three."
)
_TABLE = (
    '{"name": "Lena Fischer", "city": "Basel", "age": 41}\n{"name": "Omar Haddad", "city": "Lyon", "age": 29}\n'
    '{"name": "Priya Nair", "city": "Leeds", "age": 35}\n{"name": "Jonas Berg", "city": "Oslo", "age": 52}'
)
_STORY = (
    "The old lighthouse keeper lit the lamp every evening at six. The old lighthouse keeper wrote the names of all the "
    "ships into a book. One evening the lamp did not burn, and the ships stayed away from the coast."
)

COPYING = (
    f"Repeat the following letter word for word, but replace Tuesday by Thursday.\n\n{_LETTER}",
    f"Copy this text without any change.\n\n{_REPORT}",
    f"Rename the variable total to result in this Python function. Answer with the whole function.\n\n{_CODE}",
    f"Add a method size to this Python class. Answer with the whole class.\n\n{_CLASS}",
    f"Repeat this shopping list and add coffee at the end.\n\n{_LIST}",
    f"Write down again what Anna and Ben say, one line for each sentence.\n\n{_TALK}",
    f"Repeat these JSON lines and add a line for Mia Rossi from Rome, who is 33.\n\n{_TABLE}",
    f"Tell this story again, first word for word, then with a happy end.\n\n{_STORY}",
)

# The prompt's last words occur twice before, with different sequels: n-gram drafts exist, and are often wrong.
FORKED = f"{_STORY} The old lighthouse keeper"

OPEN = (
    "Explain why the sky is blue to a child of eight years.",
    "Write a short poem about a train that leaves at night.",
    "What should one look at before buying a used bicycle?",
    "Write a Python function that finds the longest word in a sentence.",
    "Describe the taste of a ripe pear.",
    "Give three reasons to learn a second language.",
    "How does a refrigerator keep food cold?",
    "Write the opening of a detective story set in Lisbon.",
)

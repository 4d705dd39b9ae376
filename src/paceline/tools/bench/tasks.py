"""Six tasks of twenty prompts each for comparing drafters: they differ in how much can be copied or predicted.

code: functions to complete. chat: open requests. maths: word problems. summary: a short report to shorten. translation:
    sentences, to and from four languages. questions: facts, in a sentence or two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from paceline.tools.bench.prompts import OPEN
from paceline.tools.bench.stubs import STUBS

Task = Literal["code", "chat", "maths", "summary", "translation", "questions"]
TASKS: tuple[Task, ...] = get_args(Task)

_MORE_STUBS = (
    'def is_leap(year: int) -> bool:\n    """Whether the Gregorian calendar gives this year 366 days."""\n',
    'def transpose(rows: list[list[float]]) -> list[list[float]]:\n    """Swap rows and columns of a matrix."""\n',
    'def roman(number: int) -> str:\n    """Write a number from 1 to 3999 in Roman numerals."""\n',
    'def chunked(items: list, size: int) -> list[list]:\n    """Split a list into pieces of at most size items."""\n',
)

_CHAT = (
    "My neighbour plays loud music every night. How do I talk to her about it?",
    "Suggest five names for a small bakery near a harbour and say what each one brings to mind.",
    "I have two hours free every Sunday. Which hobby would you start with little money?",
    "Write a short letter to my landlord that asks for a new kitchen tap.",
    "Tell me about a day in the life of a lighthouse keeper.",
    "How should I prepare for my first half marathon in twelve weeks?",
    "Compare living in a village with living in a large city.",
    "Invent a board game about bees and explain its rules.",
    "What would you put into a first-aid kit for a mountain hike?",
    "My sourdough bread never rises. What may be wrong?",
    "Write a toast for my sister's fortieth birthday.",
    "Explain to a grandparent what a password manager is good for.",
)

_MATHS = (
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Three pens and two books cost 19 euros. A book costs 5 euros. What does a pen cost?",
    "A tank holds 240 litres and a pump empties 15 litres a minute. After how many minutes is a quarter left?",
    "The sum of three consecutive whole numbers is 84. Which are they?",
    "A shirt costs 45 euros after a discount of 25 percent. What did it cost before?",
    "A rectangle is twice as long as it is wide and has a perimeter of 54 cm. What is its area?",
    "Lena reads 18 pages a day. Her book has 414 pages. On which day does she finish it?",
    "Four workers build a wall in six days. How long do three workers take at the same pace?",
    "Solve 3x - 7 = 2x + 12 and check the result.",
    "What is the average of 12, 19, 23, 30 and 41?",
    "A car uses 6.5 litres for 100 km. How far does it get with 52 litres?",
    "How many different two-digit numbers can be written with the digits 1, 3, 5 and 7, each used once at most?",
    "Two dice are thrown. How likely is a sum of at least ten?",
    "A savings account of 800 euros brings 3 percent a year. What is in it after two years?",
    "A recipe for four needs 300 g of rice. How much is needed for seven?",
    "Tom is three times as old as Mia. In ten years he will be twice as old. How old are they?",
    "A cube has a surface of 150 square centimetres. What is its volume?",
    "Write 84 as a product of prime numbers.",
    "A clock loses 4 minutes a day. After how many days does it show the right time again, if it has twelve hours?",
    "A class of 28 has 4 more girls than boys. How many girls are in it?",
)

_REPORTS = (
    (
        "The council met on Tuesday evening. After two hours of debate it voted, nine to four, to close the old "
        "bridge to cars from May on. Cyclists and buses may still use it. Shop owners had feared for their trade and "
        "asked for a trial of six months, which the council granted."
    ),
    (
        "The harvest of apples in the valley was a third smaller than last year. A late frost in April had damaged "
        "the blossoms, and the dry July did the rest. Growers say that prices will rise a little, and that new sorts "
        "which blossom later are being planted."
    ),
    (
        "The museum has found a letter by a painter of the seventeenth century behind the frame of one of his "
        "portraits. In it he complains about the price of blue pigment. The letter will be shown from October on, "
        "beside the picture."
    ),
    (
        "A storm cut the power of four thousand homes on Sunday night. Most had light again by morning. In the north "
        "of the county, where trees fell across the line, repairs took until Monday evening. Nobody was hurt."
    ),
    (
        "The town library lends out tools since spring: drills, ladders, even a sewing machine. Six hundred people "
        "have borrowed something so far. The most wanted piece is a device that cleans carpets, with a list of forty "
        "names."
    ),
    (
        "Researchers followed two hundred storks with small transmitters. The young birds took detours of up to a "
        "thousand kilometres on their first journey south. In their third year they flew nearly as straight as the "
        "old."
    ),
    (
        "The new tram line was to open in June. Because a delivery of rails was late, the opening moves to September. "
        "The city pays for additional buses until then, which costs about ninety thousand euros a month."
    ),
    (
        "At the school in Mill Lane pupils now begin at nine instead of eight. After one term teachers report fewer "
        "late arrivals and better marks in the first lesson. Some parents find it hard to bring children before work."
    ),
    (
        "The factory for bicycles will hire sixty people this year. Demand for cargo bicycles has doubled since the "
        "city pays a part of the price. The owners want to move production of frames back from abroad."
    ),
    (
        "A team of divers has mapped a wreck off the island. It is a merchant ship of about 1780, loaded with tiles. "
        "The wood is in good condition, as sand covered it. Raising the ship would cost too much; it stays where it "
        "is."
    ),
)

_SENTENCES = (
    "The last bus leaves at half past eleven, so we should not wait for dessert.",
    "She had forgotten the umbrella in the office and came home soaked.",
    "Please send us the signed contract by Friday at the latest.",
    "If the weather is good, we will take the boat to the small island.",
    "My grandfather repaired clocks and never wore one himself.",
)
_FOREIGN = (
    ("German", "Der Schlüssel liegt unter dem Blumentopf neben der Tür."),
    ("French", "Nous avons marché toute la journée sans rencontrer personne."),
    ("Spanish", "El mercado abre los sábados a las ocho de la mañana."),
    ("Italian", "Quando ero piccolo passavo l'estate dai nonni in campagna."),
    ("German", "Wegen einer Störung fährt der Zug heute zwanzig Minuten später."),
)
_LANGUAGES = ("German", "French", "Spanish")

_FACTS = (
    "Which planet has the most moons?",
    "Who painted the ceiling of the Sistine Chapel, and when?",
    "What is the capital of Australia?",
    "Why is the sea salty?",
    "How many chambers has a human heart, and what are they called?",
    "What does a catalyst do in a chemical reaction?",
    "Which river flows through Vienna, Budapest and Belgrade?",
    "When did the Berlin Wall fall?",
    "What is photosynthesis?",
    "Who wrote Pride and Prejudice?",
    "What is the boiling point of water on a high mountain, compared with the coast?",
    "What is the difference between weather and climate?",
    "Which gas makes up most of the air?",
    "What is inflation?",
    "Why do cats purr?",
    "What was the Silk Road?",
    "How does a vaccine work?",
    "What is the largest desert on Earth?",
    "Which instrument has 88 keys?",
    "What is a light year?",
)

PROMPTS: Mapping[Task, tuple[str, ...]] = {
    "code": tuple(f"Complete this function.\n\n```python\n{stub}\n```" for stub in (*STUBS, *_MORE_STUBS)),
    "chat": (*OPEN, *_CHAT),
    "maths": tuple(f"{text} Show how you get there." for text in _MATHS),
    "summary": (
        *(f"Summarise this report in one sentence.\n\n{report}" for report in _REPORTS),
        *(f"Write a headline and three bullet points for this report.\n\n{report}" for report in _REPORTS),
    ),
    "translation": (
        *(f"Translate into {language}: {sentence}" for sentence in _SENTENCES for language in _LANGUAGES),
        *(f"Translate from {language} into English: {sentence}" for language, sentence in _FOREIGN),
    ),
    "questions": tuple(f"{text} Answer in one or two sentences." for text in _FACTS),
}
"""Users' messages; sent through the chat template of models that have one."""

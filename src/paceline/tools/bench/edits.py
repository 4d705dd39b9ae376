"""Twenty programs of 100 to 400 tokens, each with one small change to make: the answer repeats the program."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    """A change to a program."""

    change: str
    language: str
    code: str


EDITS: tuple[Edit, ...] = (
    Edit(
        "Rename the method `amount` to `balance`, wherever it is used.",
        "python",
        '''class Account:
    """Money of one customer, in cents."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.entries: list[int] = []

    def pay_in(self, cents: int) -> None:
        if cents <= 0:
            raise ValueError(f"{cents} cents cannot be paid in")
        self.entries.append(cents)

    def pay_out(self, cents: int) -> None:
        if cents > self.amount():
            raise ValueError(f"only {self.amount()} cents are left")
        self.entries.append(-cents)

    def amount(self) -> int:
        return sum(self.entries)

    def report(self) -> str:
        return f"{self.owner}: {self.amount() / 100:.2f} in {len(self.entries)} entries"
''',
    ),
    Edit(
        "Let the limit of attempts be a parameter `attempts` with the default 5.",
        "python",
        '''import time
import urllib.request


def fetch(address, wait=0.5):
    """The bytes behind an address; tries again when the server does not answer."""
    failures = []
    for attempt in range(5):
        try:
            with urllib.request.urlopen(address, timeout=10) as reply:
                return reply.read()
        except OSError as error:
            failures.append(str(error))
            time.sleep(wait * 2**attempt)
    raise RuntimeError(f"{address} did not answer: " + "; ".join(failures))


def fetch_all(addresses):
    """By address; what cannot be fetched is None."""
    pages = {}
    for address in addresses:
        try:
            pages[address] = fetch(address)
        except RuntimeError:
            pages[address] = None
    return pages
''',
    ),
    Edit(
        "Add type hints to the parameters and results of both functions.",
        "python",
        '''def parse_time(text):
    """Seconds of a time that is written as hours:minutes:seconds, minutes:seconds or seconds."""
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def show_time(seconds, digits=1):
    """The shortest way to write a time: without hours or minutes where there are none."""
    whole = int(seconds)
    rest = f"{seconds - whole:.{digits}f}"[1:] if digits else ""
    hours, whole = divmod(whole, 3600)
    minutes, whole = divmod(whole, 60)
    if hours:
        return f"{hours}:{minutes:02}:{whole:02}{rest}"
    if minutes:
        return f"{minutes}:{whole:02}{rest}"
    return f"{whole}{rest}"
''',
    ),
    Edit(
        "The search must not count a word twice in one document. Repair `index`.",
        "python",
        '''from collections import defaultdict


def words_of(text):
    cleaned = "".join(letter if letter.isalnum() else " " for letter in text.lower())
    return [word for word in cleaned.split() if len(word) > 2]


def index(documents):
    """For each word the names of the documents that have it."""
    found = defaultdict(list)
    for name, text in documents.items():
        for word in words_of(text):
            found[word].append(name)
    return found


def search(found, query):
    """Names of documents by how many of the query's words they have, the best first."""
    hits = defaultdict(int)
    for word in words_of(query):
        for name in found.get(word, []):
            hits[name] += 1
    return sorted(hits, key=lambda name: (-hits[name], name))
''',
    ),
    Edit(
        "Add a method `peek` that returns the next item without removing it, or None.",
        "python",
        '''import heapq
from dataclasses import dataclass, field


@dataclass(order=True)
class Entry:
    priority: int
    number: int
    item: object = field(compare=False)


class Queue:
    """Items leave by priority, lower ones first; equal ones in the order in which they came."""

    def __init__(self):
        self._heap = []
        self._count = 0

    def put(self, item, priority=0):
        self._count += 1
        heapq.heappush(self._heap, Entry(priority, self._count, item))

    def get(self):
        if not self._heap:
            raise IndexError("the queue is empty")
        return heapq.heappop(self._heap).item

    def __len__(self):
        return len(self._heap)
''',
    ),
    Edit(
        "Write the result to the error output if it is an error, else to the standard output.",
        "python",
        '''import argparse
import json
import sys
from pathlib import Path


def check(path):
    """None, or what is wrong with a file."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:
        return f"is not JSON: {error}"
    return None


def main():
    parser = argparse.ArgumentParser(description="Checks JSON files.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--quiet", action="store_true", help="say nothing about good files")
    options = parser.parse_args()
    failures = 0
    for path in options.files:
        error = check(path)
        failures += error is not None
        if error is not None or not options.quiet:
            print(f"{path}: {error or 'good'}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
''',
    ),
    Edit(
        "Use the geometric mean in place of the arithmetic one in `summary`.",
        "python",
        '''import math
import statistics


def speed_ups(before, after):
    """How many times faster each benchmark became; both by name, in seconds."""
    common = before.keys() & after.keys()
    return {name: before[name] / after[name] for name in sorted(common)}


def summary(before, after):
    """One line about all benchmarks."""
    ratios = speed_ups(before, after)
    if not ratios:
        return "nothing to compare"
    mean = statistics.fmean(ratios.values())
    best = max(ratios, key=ratios.get)
    worst = min(ratios, key=ratios.get)
    return f"{mean:.2f}x on average; {best} {ratios[best]:.2f}x, {worst} {ratios[worst]:.2f}x"


def table(before, after):
    lines = [f"{'benchmark':<20}{'before':>10}{'after':>10}{'ratio':>8}"]
    for name, ratio in speed_ups(before, after).items():
        lines.append(f"{name:<20}{before[name]:>10.3f}{after[name]:>10.3f}{ratio:>8.2f}")
    return "\\n".join(lines)
''',
    ),
    Edit(
        "Make the board 8 columns wide instead of 7.",
        "python",
        '''ROWS, COLUMNS, WINNING = 6, 7, 4


def new_board():
    return [[" "] * 7 for _ in range(ROWS)]


def drop(board, column, player):
    """Let a stone fall into a column; False if it is full."""
    for row in reversed(range(ROWS)):
        if board[row][column] == " ":
            board[row][column] = player
            return True
    return False


def has_won(board, player):
    for row in range(ROWS):
        for column in range(COLUMNS):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                places = [(row + i * down, column + i * right) for i in range(WINNING)]
                inside = all(0 <= r < ROWS and 0 <= c < COLUMNS for r, c in places)
                if inside and all(board[r][c] == player for r, c in places):
                    return True
    return False


def show(board):
    return "\\n".join("|" + "|".join(row) + "|" for row in board)
''',
    ),
    Edit(
        "Log a line at level INFO whenever a value is taken from the cache.",
        "python",
        '''import functools
import logging
import time

log = logging.getLogger(__name__)


def cached_for(seconds, most=128):
    """A decorator: results are kept for a while, at most so many."""

    def decorate(function):
        kept = {}

        @functools.wraps(function)
        def wrapped(*arguments):
            now = time.monotonic()
            if arguments in kept:
                value, since = kept[arguments]
                if now - since < seconds:
                    return value
                del kept[arguments]
            value = function(*arguments)
            while len(kept) >= most:
                oldest = min(kept, key=lambda key: kept[key][1])
                log.debug("forgets %r", oldest)
                del kept[oldest]
            kept[arguments] = (value, now)
            return value

        return wrapped

    return decorate
''',
    ),
    Edit(
        "Turn the class into a frozen dataclass.",
        "python",
        '''import math


class Vector:
    """An arrow in the plane."""

    def __init__(self, x: float, y: float) -> None:
        self.x = x
        self.y = y

    def __add__(self, other: "Vector") -> "Vector":
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other: "Vector") -> "Vector":
        return Vector(self.x - other.x, self.y - other.y)

    def __mul__(self, factor: float) -> "Vector":
        return Vector(self.x * factor, self.y * factor)

    def dot(self, other: "Vector") -> float:
        return self.x * other.x + self.y * other.y

    def length(self) -> float:
        return math.hypot(self.x, self.y)

    def turned(self, angle: float) -> "Vector":
        cosine, sine = math.cos(angle), math.sin(angle)
        return Vector(self.x * cosine - self.y * sine, self.x * sine + self.y * cosine)
''',
    ),
    Edit(
        "Show the button in red (`#c0392b`) instead of green.",
        "css",
        """.card {
  display: flex;
  flex-direction: column;
  gap: 12px;
  max-width: 420px;
  padding: 20px;
  border: 1px solid #dddddd;
  border-radius: 8px;
  background: #ffffff;
}

.card h2 {
  margin: 0;
  font-size: 18px;
  color: #222222;
}

.card .button {
  align-self: flex-end;
  padding: 8px 16px;
  border: none;
  border-radius: 4px;
  color: #ffffff;
  background: #27ae60;
  cursor: pointer;
}

.card .button:hover {
  opacity: 0.85;
}

@media (max-width: 480px) {
  .card {
    max-width: none;
    border-radius: 0;
  }
}
""",
    ),
    Edit(
        "Sort the tasks by their date before they are shown.",
        "javascript",
        """const tasks = [];

function addTask(title, date) {
  if (title.trim() === "") {
    throw new Error("a task needs a title");
  }
  tasks.push({ title: title.trim(), date: new Date(date), done: false });
  render();
}

function finishTask(index) {
  tasks[index].done = true;
  render();
}

function render() {
  const list = document.querySelector("#tasks");
  list.replaceChildren();
  tasks.forEach((task, index) => {
    const item = document.createElement("li");
    item.textContent = `${task.date.toLocaleDateString()}: ${task.title}`;
    item.classList.toggle("done", task.done);
    item.addEventListener("click", () => finishTask(index));
    list.append(item);
  });
  const open = tasks.filter((task) => !task.done).length;
  document.querySelector("#open").textContent = `${open} open`;
}
""",
    ),
    Edit(
        "Add an optional field `phone` of type string to the interface and to the check.",
        "typescript",
        """export interface Customer {
  id: number;
  name: string;
  email: string;
  newsletter: boolean;
}

export function isCustomer(value: unknown): value is Customer {
  if (typeof value !== "object" || value === null) {
    return false;
  }
  const customer = value as Record<string, unknown>;
  return (
    typeof customer.id === "number" &&
    typeof customer.name === "string" &&
    typeof customer.email === "string" &&
    typeof customer.newsletter === "boolean"
  );
}

export async function loadCustomers(url: string): Promise<Customer[]> {
  const reply = await fetch(url, { headers: { Accept: "application/json" } });
  if (!reply.ok) {
    throw new Error(`${url}: ${reply.status}`);
  }
  const found: unknown = await reply.json();
  if (!Array.isArray(found)) {
    throw new Error(`${url}: not a list`);
  }
  return found.filter(isCustomer);
}
""",
    ),
    Edit(
        "Return an error instead of calling panic.",
        "go",
        """package inventory

import (
	"fmt"
	"sort"
)

type Item struct {
	Name  string
	Count int
	Price float64
}

type Store struct {
	items map[string]*Item
}

func New() *Store {
	return &Store{items: make(map[string]*Item)}
}

func (s *Store) Add(name string, count int, price float64) {
	if count < 0 {
		panic(fmt.Sprintf("count of %s is negative: %d", name, count))
	}
	if item, ok := s.items[name]; ok {
		item.Count += count
		item.Price = price
		return
	}
	s.items[name] = &Item{Name: name, Count: count, Price: price}
}

func (s *Store) Names() []string {
	names := make([]string, 0, len(s.items))
	for name := range s.items {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}
""",
    ),
    Edit(
        "Use `double` in place of `float` everywhere.",
        "cpp",
        """#include <cmath>
#include <cstddef>
#include <vector>

struct Statistics {
  float mean = 0.0f;
  float deviation = 0.0f;
  float least = 0.0f;
  float most = 0.0f;
};

Statistics describe(const std::vector<float>& values) {
  Statistics result;
  if (values.empty()) return result;
  result.least = result.most = values[0];
  float sum = 0.0f;
  for (const float value : values) {
    sum += value;
    if (value < result.least) result.least = value;
    if (value > result.most) result.most = value;
  }
  result.mean = sum / values.size();
  float squares = 0.0f;
  for (const float value : values) {
    squares += (value - result.mean) * (value - result.mean);
  }
  result.deviation = std::sqrt(squares / values.size());
  return result;
}
""",
    ),
    Edit(
        "Let `longest_line` return the line's number, too, counted from 1.",
        "rust",
        """use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

pub struct Counts {
    pub lines: usize,
    pub words: usize,
    pub bytes: usize,
}

pub fn count(path: &Path) -> io::Result<Counts> {
    let reader = BufReader::new(File::open(path)?);
    let mut counts = Counts { lines: 0, words: 0, bytes: 0 };
    for line in reader.lines() {
        let line = line?;
        counts.lines += 1;
        counts.words += line.split_whitespace().count();
        counts.bytes += line.len() + 1;
    }
    Ok(counts)
}

pub fn longest_line(path: &Path) -> io::Result<String> {
    let reader = BufReader::new(File::open(path)?);
    let mut longest = String::new();
    for line in reader.lines() {
        let line = line?;
        if line.len() > longest.len() {
            longest = line;
        }
    }
    Ok(longest)
}
""",
    ),
    Edit(
        "Only count orders of the year 2024.",
        "sql",
        """CREATE VIEW customer_totals AS
SELECT
    customers.id,
    customers.name,
    customers.country,
    COUNT(orders.id) AS orders,
    SUM(order_lines.quantity * order_lines.price) AS revenue,
    MAX(orders.ordered_at) AS last_order
FROM customers
JOIN orders ON orders.customer_id = customers.id
JOIN order_lines ON order_lines.order_id = orders.id
WHERE orders.status <> 'cancelled'
GROUP BY customers.id, customers.name, customers.country
HAVING SUM(order_lines.quantity * order_lines.price) > 100
ORDER BY revenue DESC;

CREATE INDEX orders_by_customer ON orders (customer_id, ordered_at);
CREATE INDEX lines_by_order ON order_lines (order_id);
""",
    ),
    Edit(
        "Run the tests on Python 3.13, too.",
        "yaml",
        """name: checks

on:
  push:
    branches: [main]
  pull_request:

jobs:
  test:
    runs-on: ubuntu-24.04
    strategy:
      fail-fast: false
      matrix:
        python: ["3.11", "3.12"]
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: ${{ matrix.python }}
          cache: pip
      - name: Install
        run: pip install -e ".[dev]"
      - name: Style
        run: ruff check . && ruff format --check .
      - name: Types
        run: mypy --strict src
      - name: Tests
        run: pytest -q --cov=src --cov-report=term-missing
""",
    ),
    Edit(
        "Keep the seven latest backups instead of three.",
        "bash",
        """#!/usr/bin/env bash
# Makes a backup of a directory and removes the oldest ones.
set -euo pipefail

source_directory=${1:?which directory?}
target_directory=${2:-/var/backups}
keep=3

if [ ! -d "$source_directory" ]; then
  echo "there is no directory $source_directory" >&2
  exit 1
fi

mkdir -p "$target_directory"
name=$(basename "$source_directory")
stamp=$(date +%Y-%m-%d-%H%M%S)
archive="$target_directory/$name-$stamp.tar.gz"

tar -czf "$archive.partial" -C "$(dirname "$source_directory")" "$name"
mv "$archive.partial" "$archive"
echo "wrote $archive"

ls -1t "$target_directory/$name"-*.tar.gz | tail -n +4 | while read -r old; do
  rm -- "$old"
  echo "removed $old"
done
""",
    ),
    Edit(
        "Rename the configuration's key `host` to `address`.",
        "java",
        """package example.settings;

import java.util.Map;
import java.util.Objects;

public final class Settings {
    private final String host;
    private final int port;
    private final boolean secure;

    public Settings(Map<String, String> values) {
        this.host = Objects.requireNonNull(values.get("host"), "host is missing");
        this.port = Integer.parseInt(values.getOrDefault("port", "8080"));
        this.secure = Boolean.parseBoolean(values.getOrDefault("secure", "true"));
        if (port < 1 || port > 65535) {
            throw new IllegalArgumentException("port is out of range: " + port);
        }
    }

    public String url() {
        String scheme = secure ? "https" : "http";
        return scheme + "://" + host + ":" + port;
    }

    public int port() {
        return port;
    }
}
""",
    ),
)

"""Prompts made from templates of our own: pairs of a task and a subject, and sums. No evaluation set is in them."""

import itertools
import random

from jaxspec.training.prompts import Prompt, without_duplicates


def template_prompts(count: int, seed: int) -> list[Prompt]:
    """Up to `count` different prompts, a quarter each of chat, explanations, code and arithmetic, in random order.

    The first three are drawn from all pairs of a task and a subject, so there are at most 800, 600 and 384 of them.
    """
    chat = [(task.format(x), "template-chat") for task, x in itertools.product(CHAT_TASKS, CHAT_SUBJECTS)]
    explain = [(task.format(x), "template-explain") for task, x in itertools.product(EXPLAIN_TASKS, EXPLAIN_SUBJECTS)]
    code = [(task.format(x), "template-code") for task, x in itertools.product(CODE_TASKS, CODE_SUBJECTS)]
    draw = random.Random(seed)
    pools = [draw.sample(pool, min(count // 4, len(pool))) for pool in (chat, explain, code)]
    sums = (_arithmetic(draw) for _ in range(count // 4))
    prompts = [Prompt(text, source) for text, source in itertools.chain(*pools, sums)]
    draw.shuffle(prompts)
    return without_duplicates(prompts)


def _arithmetic(draw: random.Random) -> tuple[str, str]:
    """A word problem with numbers of its own."""
    name, thing, place = draw.choice(NAMES), draw.choice(THINGS), draw.choice(PLACES)
    a, b, c = draw.randint(3, 60), draw.randint(2, 20), draw.randint(2, 12)
    return draw.choice(PROBLEMS).format(
        name=name, thing=thing, place=place, a=a, b=b, c=c, ab=a * b
    ), "template-arithmetic"


CHAT_TASKS = (
    "Can you give me some advice about {}?",
    "Write a short story about {}.",
    "Write a friendly email about {}.",
    "Give me five tips for {}.",
    "What should a beginner know about {}?",
    "Make a simple plan for {} that takes one week.",
    "Write a poem of eight lines about {}.",
    "List the pros and cons of {}.",
    "Suggest three questions that I could ask an expert about {}.",
    "Help me write a speech of one minute about {}.",
    "Summarize the main ideas behind {} in three sentences.",
    "Describe a typical mistake people make with {} and how to avoid it.",
    "Write a dialogue between two friends who talk about {}.",
    "I feel unsure about {}. What would you tell me?",
    "Make a checklist for {}.",
    "Come up with a catchy title and an introduction for a blog post about {}.",
)
CHAT_SUBJECTS = (
    "learning to cook", "moving to a new city", "growing tomatoes", "keeping a diary", "training for a long run",
    "adopting a dog", "saving money", "a job interview", "planning a birthday party", "learning the guitar",
    "reading more books", "sleeping better", "travelling by train", "a walk in the mountains", "making new friends",
    "working from home", "starting a small garden", "repairing a bicycle", "a family dinner",
    "writing a letter to a friend", "visiting a museum", "learning a foreign language", "drawing with pencils",
    "a rainy weekend", "helping a neighbour", "buying a used car", "organising a desk", "eating more vegetables",
    "taking better photographs", "a camping trip", "giving a presentation", "getting up early",
    "teaching a child to swim", "baking bread", "playing chess", "looking after old people", "dealing with stress",
    "choosing a present", "keeping bees", "a school trip", "painting a room", "renting a flat",
    "starting a book club", "volunteering", "a day at the beach", "using less plastic", "learning to dance",
    "a lost wallet", "a noisy neighbour", "cleaning the kitchen",
)  # fmt: skip
EXPLAIN_TASKS = (
    "Explain {} in simple terms.",
    "What is {} and why does it matter?",
    "How does {} work? Give an example.",
    "Explain {} to a ten year old child.",
    "What are common misunderstandings about {}?",
    "Describe {} step by step.",
    "What is the history of {}?",
    "Give three interesting facts about {}.",
    "What would happen if there were no {}?",
    "Write a paragraph for a textbook about {}.",
    "Compare {} with something from daily life.",
    "What are the causes and effects of {}?",
)
EXPLAIN_SUBJECTS = (
    "photosynthesis", "gravity", "inflation", "the water cycle", "electricity", "the immune system", "a volcano",
    "the moon's phases", "evolution", "supply and demand", "a black hole", "the greenhouse effect", "a vaccine",
    "DNA", "magnetism", "the printing press", "democracy", "a computer network", "sound", "the tides",
    "an earthquake", "plate tectonics", "a rainbow", "the heart", "digestion", "the Roman Empire", "the Silk Road",
    "a steam engine", "encryption", "an algorithm", "machine learning", "a battery", "solar power", "friction",
    "atoms", "the ozone layer", "migration of birds", "the nervous system", "compound interest", "a hurricane",
    "the Renaissance", "radio", "light", "the scientific method", "erosion", "pollination", "a glacier",
    "the stock market", "probability", "bacteria",
)  # fmt: skip
CODE_TASKS = (
    "Write a Python function that {}.",
    "Write a Python function that {} and explain how it works.",
    "How can I write a program in Python that {}? Show an example with its output.",
    "Write a short Python script that {}, with comments.",
    "Write a JavaScript function that {}.",
    "Write a Python function that {}, and three simple tests for it.",
    "Write a C function that {}.",
    "Write a Python class with a method that {}.",
)
CODE_SUBJECTS = (
    "counts the vowels of a text", "reverses the words of a sentence", "finds the largest number in a list",
    "converts degrees Celsius to Fahrenheit", "merges two sorted lists", "removes duplicates from a list",
    "computes the average of a list of numbers", "reads a text file and counts its lines",
    "sorts names by their length", "draws a triangle of stars", "rolls two dice many times and counts the sums",
    "finds the common letters of two words", "turns a number of seconds into hours, minutes and seconds",
    "computes the area of a circle", "groups words by their first letter", "multiplies two matrices",
    "swaps the keys and values of a dictionary", "checks whether a year is a leap year", "computes a running total",
    "replaces every digit in a text by a star", "searches a sorted list by halving it",
    "splits a list into pieces of equal size", "flattens a nested list", "writes a list of rows to a CSV file",
    "finds the second smallest number", "keeps a queue of tasks by priority",
    "computes the greatest common divisor of two numbers", "prints a multiplication table",
    "encodes a text with a shift", "counts how often every word occurs", "computes the distance between two points",
    "validates a password's length", "simulates a simple bank account", "generates a random password",
    "computes compound interest year by year", "finds the longest word of a text", "rotates a list by some places",
    "checks whether brackets are balanced", "converts a binary number to a decimal one",
    "sums the digits of a number", "lists the files of a folder", "parses a date and prints the weekday",
    "finds all numbers divisible by three or five", "transposes a table", "computes the median of a list",
    "shuffles a deck of cards", "compares two version numbers", "pads a text on the left",
)  # fmt: skip
NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jade", "Kofi", "Lena", "Mats", "Nora")
THINGS = ("apples", "pencils", "stamps", "tickets", "cookies", "books", "flowers", "marbles", "bottles", "postcards")
PLACES = ("a shop", "the market", "a school", "the library", "a garden", "the station", "a bakery", "the museum")
PROBLEMS = (
    "{name} has {a} {thing} and buys {b} boxes with {c} {thing} each at {place}. How many is that in all?",
    "At {place}, {name} sells {a} {thing} for {c} dollars each and pays {b} dollars for the stand. How much is left?",
    "{name} shares {ab} {thing} equally among {b} friends. How many {thing} does each friend get?",
    "{name} walks {c} kilometres to {place} every day. How many kilometres is that in {b} days?",
    "In summer, {place} opens for {c} hours a day and {a} people come every hour. How many people come in {b} days?",
    "{name} reads {b} pages a day. How many days does a book of {ab} pages take?",
    "{name} had {ab} {thing}, gave away {a} and then lost {c}. How many {thing} are left?",
    "One of the {thing} costs {c} dollars. {name} has {ab} dollars. How many can {name} buy, and what is left?",
    "{name} is {a} years old. How old will {name} be in {b} years, and how old {c} years ago?",
    "What is {a} times {b} plus {c}? Show each step.",
)

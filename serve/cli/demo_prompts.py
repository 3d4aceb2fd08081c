"""Prompts of our own, for the demo and for the measured floor of its drafter; none was trained on."""

DEMO_PROMPTS: tuple[tuple[str, str], ...] = (
    ("chat", "Give me three tips for sleeping better."),
    ("chat", "My sister turns thirty next week. What could I write on her birthday card?"),
    ("chat", "Explain why the sky is blue, in three sentences."),
    ("chat", "What is the difference between a comet and an asteroid?"),
    ("chat", "Write a short thank-you note to a teacher who helped me prepare for an exam."),
    ("chat", "Which household items can be recycled, and which cannot?"),
    ("chat", "Describe a quiet morning by a lake in one paragraph."),
    (
        "maths",
        "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left? Explain step by step.",
    ),
    ("maths", "A train travels 180 miles in 3 hours. How far does it travel in 5 hours at the same speed?"),
    ("maths", "What is 15 percent of 240? Show your work."),
    ("maths", "Solve the equation 3x + 7 = 25 and explain each step."),
    ("maths", "A rectangle is 8 cm long and 5 cm wide. What are its area and its perimeter?"),
    ("maths", "Sara saves 4 dollars every day. How many days does she need to save 92 dollars?"),
    ("maths", "If two dice are rolled, what is the probability that their sum is 7?"),
    ("code", "Write a Python function that returns the sum of the even numbers in a list."),
    ("code", "Write a Python function that checks whether a string is a palindrome."),
    ("code", "How do I read a text file line by line in Python? Show an example."),
    ("code", "Write a Python class for a bank account with deposit and withdraw methods."),
    ("code", "Explain what a for loop does in Python and give a small example."),
    ("code", "Write a Python function that counts how often each word occurs in a text."),
)

"""Prompts made from templates."""

from jaxspec.training.templates import template_prompts


def test_prompts_differ_and_are_the_same_in_every_run():
    prompts = template_prompts(1200, 0)
    assert len({p.text for p in prompts}) == len(prompts) >= 1150
    assert {p.source for p in prompts} == {f"template-{kind}" for kind in ("chat", "explain", "code", "arithmetic")}
    assert prompts == template_prompts(1200, 0)
    assert not any("{" in p.text for p in prompts)

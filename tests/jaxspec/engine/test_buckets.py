"""The sizes that programs are compiled for."""

from jaxspec.engine.buckets import bucket, smallest_that_holds


def test_buckets_grow_fourfold_up_to_the_largest() -> None:
    assert [bucket(n, 40) for n in (1, 2, 4, 5, 16, 17, 40)] == [1, 4, 4, 16, 16, 40, 40]
    assert [bucket(n, 512, 32) for n in (1, 32, 33, 129, 512)] == [32, 32, 128, 512, 512]
    assert bucket(3, 2, 8) == 2


def test_the_smallest_size_that_holds_is_taken() -> None:
    assert [smallest_that_holds(count, (1, 4, 10)) for count in (1, 2, 4, 5, 10)] == [1, 4, 4, 10, 10]

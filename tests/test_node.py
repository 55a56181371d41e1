"""The children of a node: a dict that knows the token order, with few keys and with many."""

import random

from radixkv.node import MANY_CHILDREN, Children, RadixNode, Use


def leaf(key):
    """A node under that key."""
    return RadixNode(key, None, None, 0, Use(0, 0), 0)


def test_neighbours_and_order_agree_with_a_sorted_list_below_and_above_the_index():
    """A hit inside a block is found beside the prompt's place; the index must not miss a key while a node fills."""
    draw = random.Random(5)
    children = Children()
    model: dict[bytes, RadixNode] = {}
    grew = 0
    for step in range(3000):
        key = bytes(draw.choices(b"ab", k=draw.randint(1, 8)))
        want_more = (step // 300) % 2 == 0
        if draw.random() < (0.7 if want_more else 0.2):
            model[key] = children[key] = leaf(key)
        elif key in model:
            del model[key], children[key]
        grew += len(children) == MANY_CHILDREN
        keys = sorted(model)
        assert children.in_order() == [model[key] for key in keys]
        head = bytes(draw.choices(b"ab", k=draw.randint(1, 8)))
        below = [key for key in keys if key < head]
        rest = [key for key in keys if key >= head]
        assert children.around(head) == (below[-1] if below else None, rest[0] if rest else None)
    assert grew > 1

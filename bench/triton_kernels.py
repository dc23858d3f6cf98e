"""Allocation in the shape in which engines ship it: one program a request, each reading all earlier lengths.

The batch bound is a compile-time constant, so that each power of two is a kernel of its own. The free list is not
specialised by its alignment, as engines do it, since it is sliced after every call.
"""

# Annotations are read by the compiler, and must not be strings.
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["free_pages"])
def decode_kernel(seq_lens, last_loc, free_pages, out, batch_bound: tl.constexpr, page_size: tl.constexpr):
    i = tl.program_id(0)
    batch = tl.arange(0, batch_bound)
    earlier = batch < i
    seq = tl.load(seq_lens + batch, mask=earlier, other=2)
    taken = tl.sum(tl.where(earlier & ((seq - 1) % page_size == 0), 1, 0))
    mine = tl.load(seq_lens + i)
    if (mine - 1) % page_size == 0:
        tl.store(out + i, tl.load(free_pages + taken) * page_size)
    else:
        tl.store(out + i, tl.load(last_loc + i) + 1)


@triton.jit(do_not_specialize=["free_pages"])
def extend_kernel(
    prefix_lens,
    seq_lens,
    last_loc,
    free_pages,
    out,
    batch_bound: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    i = tl.program_id(0)
    batch = tl.arange(0, batch_bound)
    earlier = batch < i
    seqs = tl.load(seq_lens + batch, mask=earlier, other=0)
    prefixes = tl.load(prefix_lens + batch, mask=earlier, other=0)
    begin = tl.sum(seqs - prefixes)
    first = tl.sum(tl.cdiv(seqs, page_size) - tl.cdiv(prefixes, page_size))

    seq = tl.load(seq_lens + i)
    prefix = tl.load(prefix_lens + i)
    aligned = tl.cdiv(prefix, page_size) * page_size

    # The rest of the old page.
    old = tl.minimum(seq, aligned) - prefix
    offset = tl.arange(0, page_size)
    tl.store(out + begin + offset, tl.load(last_loc + i) + 1 + offset, mask=offset < old)

    # Whole new pages, a block of tokens after the other.
    whole = tl.maximum(seq // page_size * page_size - aligned, 0)
    begin += old
    done = whole * 0
    while done < whole:
        token = done + tl.arange(0, block)
        page = tl.load(free_pages + first + token // page_size, mask=token < whole, other=0)
        tl.store(out + begin + token, page * page_size + token % page_size, mask=token < whole)
        done += block

    # The new last page.
    tail = seq - aligned - whole
    if tail > 0:
        page = tl.load(free_pages + first + whole // page_size)
        tl.store(out + begin + whole + offset, page * page_size + offset, mask=offset < tail)

//! The allocator of the whole program.
//!
//! Requests make and drop many small values on several threads at once, some of them on another thread than they were
//! made on. An allocator with a heap for each thread has no locks to fight for. Huge pages are off: they are quick to
//! fill and slow to give back, and most of this program is small.

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys as mi;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// mimalloc, without its detour for alignments where every block has the one that is asked for.
struct Allocator;

/// Like C's `malloc`, mimalloc's aligns a block for everything that fits into it and is no more than a word.
fn is_usual(layout: Layout) -> bool {
    layout.align() <= align_of::<usize>() && layout.align() <= layout.size()
}

// SAFETY: blocks come from mimalloc, are large and aligned as asked for, and go back to it: all of its functions for
// allocation agree on what `mi_free` takes.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: neither function asks for anything.
        unsafe {
            if is_usual(layout) {
                return mi::mi_malloc(layout.size()).cast();
            }
            mi::mi_malloc_aligned(layout.size(), layout.align()).cast()
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: neither function asks for anything.
        unsafe {
            if is_usual(layout) {
                return mi::mi_zalloc(layout.size()).cast();
            }
            mi::mi_zalloc_aligned(layout.size(), layout.align()).cast()
        }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        // SAFETY: the caller says that the block is one of ours.
        unsafe { mi::mi_free(block.cast()) };
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller says that the block is one of ours, and the size no longer than one can be.
        unsafe {
            if is_usual(layout) && layout.align() <= size {
                return mi::mi_realloc(block.cast(), size).cast();
            }
            mi::mi_realloc_aligned(block.cast(), size, layout.align()).cast()
        }
    }
}

/// Returns free memory to the system. Worth a call when a burst of work is over.
pub fn give_back() {
    // SAFETY: empty pages are released; allocated memory stays where it is.
    unsafe { mi::mi_collect(true) };
    // C code has its own.
    #[cfg(target_env = "gnu")]
    // SAFETY: as above.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Lets programs that this process starts have huge pages if they want: that they are off is inherited.
pub fn allow_huge_pages_again() {
    // SAFETY: plain integers.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 0, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_and_keep_what_is_in_them() {
        for align in [1, 2, 4, 8, 16, 64, 4096] {
            for size in [1, 3, 8, 12, 24, 100, 1000, 100_000] {
                let layout = Layout::from_size_align(size, align).unwrap();
                // SAFETY: the layouts have a size, and blocks are used within them and given back once.
                unsafe {
                    let block = ALLOCATOR.alloc_zeroed(layout);
                    assert!(!block.is_null() && block.addr().is_multiple_of(align), "{layout:?}");
                    assert!(
                        std::slice::from_raw_parts(block, size).iter().all(|byte| *byte == 0),
                        "{layout:?}"
                    );
                    block.write_bytes(7, size);
                    let grown = ALLOCATOR.realloc(block, layout, size * 3);
                    assert!(!grown.is_null() && grown.addr().is_multiple_of(align), "{layout:?}");
                    assert!(
                        std::slice::from_raw_parts(grown, size).iter().all(|byte| *byte == 7),
                        "{layout:?}"
                    );
                    ALLOCATOR.dealloc(grown, Layout::from_size_align(size * 3, align).unwrap());
                    let block = ALLOCATOR.alloc(layout);
                    assert!(!block.is_null() && block.addr().is_multiple_of(align), "{layout:?}");
                    ALLOCATOR.dealloc(block, layout);
                }
            }
        }
        give_back();
    }
}

//! The allocator of our programs, which each of them chooses:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: ferrite_memory::Allocator = ferrite_memory::Allocator;
//! ```
//!
//! Requests make and drop many small values on several threads at once, some of them on another thread than they were
//! made on. An allocator with a heap for each thread has no locks to fight for. Huge pages are off: they are quick to
//! fill and slow to give back, and most of this program is small.

pub mod usage;

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use libmimalloc_sys as mi;

/// mimalloc, without its detour for alignments where every block has the one that is asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Allocator;

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

/// Counts the calls of [`give_back`].
static ROUND: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The last round in which this thread returned its free memory.
    static RETURNED: Cell<u64> = const { Cell::new(0) };
}

/// Returns free memory to the system, and the pages of code that nothing runs any more. Worth a call when a burst of
/// work is over.
///
/// A thread's heap can only be emptied by that thread. This call empties its caller's and asks all others to empty
/// theirs, which they do in [`give_back_if_asked`].
pub fn give_back() {
    unmap_code();
    ROUND.fetch_add(1, Ordering::Relaxed);
    give_back_if_asked();
    // C code has its own.
    #[cfg(target_env = "gnu")]
    // SAFETY: free memory is released; allocated memory stays where it is.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Returns the free memory of this thread's heap, once after each call of [`give_back`]. Threads that live long call
/// this before they wait for work; if they need not do anything, it costs next to nothing.
pub fn give_back_if_asked() {
    let round = ROUND.load(Ordering::Relaxed);
    if RETURNED.replace(round) != round {
        // SAFETY: empty pages are released; allocated memory stays where it is.
        unsafe { mi::mi_collect(true) };
    }
}

/// Leaves the pages of the program's code to the system, which keeps them for as long as it has room; code that runs
/// is mapped again when it is next called, and code that only a start or a burst needed stays away.
fn unmap_code() {
    // Read as text: the mapping that holds this function is the one that holds the code.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    if let Some((start, length)) = code_at(&maps, (unmap_code as fn()) as usize) {
        // SAFETY: the mapping is of a file and cannot be written to, so each page can be read from the file again.
        unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(start), length, libc::MADV_DONTNEED) };
    }
}

/// Start and length of the mapping that holds `address`, if it is private code of a file that nothing can write to.
fn code_at(maps: &str, address: usize) -> Option<(usize, usize)> {
    maps.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
        let is_code = fields.next()? == "r-xp" && fields.nth(3)?.starts_with('/');
        (is_code && (start..end).contains(&address)).then_some((start, end - start))
    })
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
    fn only_code_of_a_file_is_left_to_the_system() {
        let maps = "1000-2000 r--p 00000000 fe:00 12   /bin/x\n2000-5000 r-xp 00001000 fe:00 12   /bin/x y\n\
                    5000-6000 rwxp 00000000 fe:00 12   /bin/x\n6000-7000 r-xp 00000000 00:00 0\n\
                    7000-8000 r-xp 00000000 00:00 0   [vdso]\nnonsense\n";
        let rows = [
            (0x1000, None),
            (0x2000, Some((0x2000, 0x3000))),
            (0x4fff, Some((0x2000, 0x3000))),
            (0x5000, None),
            (0x6000, None),
            (0x7000, None),
        ];
        for (address, expected) in rows {
            assert_eq!(code_at(maps, address), expected, "{address:#x}");
        }
        let own = std::fs::read_to_string("/proc/self/maps").unwrap();
        let code = code_at(&own, (unmap_code as fn()) as usize);
        assert!(code.is_some_and(|(_, length)| length > 0), "{own}");
        unmap_code();
    }

    /// Blocks that one thread allocated and another freed are in the heap of the first.
    #[test]
    fn a_thread_that_waits_returns_memory_when_asked() {
        const BLOCK: Layout = Layout::new::<[u8; 1000]>();
        const BLOCKS: usize = 50_000;
        let (give, take) = std::sync::mpsc::channel::<Vec<usize>>();
        let (ask, asked) = std::sync::mpsc::channel::<()>();
        let (answer, answered) = std::sync::mpsc::channel::<()>();
        let owner = std::thread::spawn(move || {
            // SAFETY: the layout has a size, and blocks are written within it.
            let block = || unsafe {
                let block = Allocator.alloc(BLOCK);
                block.write_bytes(1, BLOCK.size());
                block.expose_provenance()
            };
            give.send((0..BLOCKS).map(|_| block()).collect()).unwrap();
            while asked.recv().is_ok() {
                give_back_if_asked();
                answer.send(()).unwrap();
            }
        });
        let resident = || usage::rollup(std::process::id(), "Rss:");
        for block in take.recv().unwrap() {
            // SAFETY: each block comes from the allocator and is freed once.
            unsafe { Allocator.dealloc(std::ptr::with_exposed_provenance_mut(block), BLOCK) };
        }
        give_back();
        let before = resident();
        ask.send(()).unwrap();
        answered.recv().unwrap();
        let after = resident();
        drop(ask);
        owner.join().unwrap();
        assert!(after + 20_000 < before, "{before} KiB before, {after} KiB after");
    }

    #[test]
    fn blocks_are_aligned_and_keep_what_is_in_them() {
        for align in [1, 2, 4, 8, 16, 64, 4096] {
            for size in [1, 3, 8, 12, 24, 100, 1000, 100_000] {
                let layout = Layout::from_size_align(size, align).unwrap();
                // SAFETY: the layouts have a size, and blocks are used within them and given back once.
                unsafe {
                    let block = Allocator.alloc_zeroed(layout);
                    assert!(!block.is_null() && block.addr().is_multiple_of(align), "{layout:?}");
                    assert!(
                        std::slice::from_raw_parts(block, size).iter().all(|byte| *byte == 0),
                        "{layout:?}"
                    );
                    block.write_bytes(7, size);
                    let grown = Allocator.realloc(block, layout, size * 3);
                    assert!(!grown.is_null() && grown.addr().is_multiple_of(align), "{layout:?}");
                    assert!(
                        std::slice::from_raw_parts(grown, size).iter().all(|byte| *byte == 7),
                        "{layout:?}"
                    );
                    Allocator.dealloc(grown, Layout::from_size_align(size * 3, align).unwrap());
                    let block = Allocator.alloc(layout);
                    assert!(!block.is_null() && block.addr().is_multiple_of(align), "{layout:?}");
                    Allocator.dealloc(block, layout);
                }
            }
        }
        give_back();
    }
}

//! Spare segments: empty files of the memory tier whose room is taken and faulted in beforehand, so that the next import of
//! the same sizes does not wait for fresh pages. Made in the background after a segment of that size has gone, within what
//! the budget has free. No file that ever held a model comes back: a spare is a new one and holds zeros.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::folder::{OnPath, PathError, remove_file, remove_folder, rename};
use crate::segment::Segment;

/// Taken between two looks at whether it is still wanted: an import that needs the room waits no longer than this takes.
const STEP_BYTES: u64 = 4 << 20;
const PAUSE: Duration = Duration::from_micros(100);

/// A segment that is not part of any instance yet. Its file goes when it is dropped.
#[derive(Debug)]
pub(crate) struct Spare {
    path: PathBuf,
    segment: Arc<Segment>,
    bytes: u64,
    /// Bytes from its start whose room is taken.
    done: u64,
    used: bool,
}

impl Spare {
    fn create(path: PathBuf, bytes: u64, huge: bool) -> Result<Self, PathError> {
        let segment = Arc::new(Segment::create(&path, bytes, huge)?);
        Ok(Self { path, segment, bytes, done: 0, used: false })
    }

    /// Bytes of it whose room is taken, all from its start on.
    pub(crate) fn ready_bytes(&self) -> u64 {
        self.done
    }

    /// Gives its file its place in an instance.
    pub(crate) fn place(mut self, path: &Path) -> Result<Arc<Segment>, PathError> {
        rename(&self.path, path)?;
        self.used = true;
        Ok(self.segment.clone())
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if !self.used
            && let Err(error) = remove_file(&self.path)
        {
            tracing::warn!(%error, "a spare segment stays until the node starts anew");
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// Sizes of the segments that went, oldest first.
    wanted: VecDeque<u64>,
    ready: VecDeque<Spare>,
    making: Option<Spare>,
    /// What all of them may take together: what the budget has free.
    room_bytes: u64,
    made: u64,
    stop: bool,
}

impl State {
    fn bytes(&self) -> u64 {
        self.ready.iter().chain(&self.making).map(|spare| spare.bytes).sum()
    }
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    huge: bool,
    state: Mutex<State>,
    /// Told when something is wanted, and at the end.
    wake: Condvar,
}

/// The spare segments of a memory tier.
#[derive(Debug)]
pub(crate) struct Spares {
    shared: Arc<Shared>,
    maker: Option<JoinHandle<()>>,
}

impl Spares {
    /// Begins without any; what an earlier run left in `folder` is removed.
    pub(crate) fn open(folder: PathBuf, huge: bool) -> Result<Self, PathError> {
        remove_folder(&folder)?;
        fs::create_dir(&folder).on("create", &folder)?;
        let shared = Arc::new(Shared { folder, huge, state: Mutex::default(), wake: Condvar::new() });
        let (own, thread) = (shared.clone(), std::thread::Builder::new().name("spare-segments".to_owned()));
        let maker = thread.spawn(move || own.make()).on("start the thread of", &shared.folder)?;
        Ok(Self { shared, maker: Some(maker) })
    }

    /// A segment of this size has gone, and another is likely to come.
    pub(crate) fn want(&self, bytes: u64) {
        let mut state = self.shared.lock();
        let asked: u64 = state.wanted.iter().sum();
        if bytes > 0 && asked + bytes <= state.room_bytes {
            state.wanted.push_back(bytes);
            self.shared.wake.notify_all();
        }
    }

    /// Takes one of this size, whole or as far as it has been made.
    pub(crate) fn take(&self, bytes: u64) -> Option<Spare> {
        let mut state = self.shared.lock();
        match state.ready.iter().position(|spare| spare.bytes == bytes) {
            Some(at) => state.ready.remove(at),
            None => state.making.take_if(|spare| spare.bytes == bytes),
        }
    }

    /// Gives up as many, the oldest first, that the others fit what the budget has free. After this returns no more room
    /// than that is taken.
    pub(crate) fn fit(&self, free_bytes: u64) {
        let mut state = self.shared.lock();
        state.room_bytes = free_bytes;
        while state.bytes() > free_bytes {
            if state.ready.pop_front().is_none() {
                state.making = None;
            }
        }
    }

    /// Bytes of all of them.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> u64 {
        self.shared.lock().bytes()
    }

    /// Whether nothing is being made or waits to be.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.shared.lock();
        state.wanted.is_empty() && state.making.is_none()
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake.notify_all();
        if let Some(maker) = self.maker.take()
            && maker.join().is_err()
        {
            tracing::error!("the thread that makes spare segments has panicked");
        }
        *self.shared.lock() = State::default();
        if let Err(error) = remove_folder(&self.shared.folder) {
            tracing::warn!(%error, "spare segments stay until the node starts anew");
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // What is changed under it is changed in single statements; a panic elsewhere can not leave it torn.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self) {
        loop {
            {
                let waiting = self.wake.wait_while(self.lock(), |state| state.wanted.is_empty() && !state.stop);
                let mut state = waiting.unwrap_or_else(PoisonError::into_inner);
                if state.stop {
                    return;
                }
                let Some(bytes) = state.wanted.pop_front() else { continue };
                if state.bytes().saturating_add(bytes) > state.room_bytes {
                    continue;
                }
                state.made += 1;
                match Spare::create(self.folder.join(format!("{:06}", state.made)), bytes, self.huge) {
                    Ok(spare) => state.making = Some(spare),
                    Err(error) => tracing::warn!(%error, "a spare segment can not be made"),
                }
            }
            while self.step() {
                // Those who wait for the lock get it now.
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Takes the next piece of room, under the lock, so that nobody counts on room that is being taken. Answers whether there
    /// is more to do.
    fn step(&self) -> bool {
        let mut state = self.lock();
        let Some(spare) = state.making.as_mut().filter(|spare| spare.done < spare.bytes) else {
            let made = state.making.take();
            state.ready.extend(made);
            return false;
        };
        let end = spare.bytes.min(spare.done + STEP_BYTES);
        match spare.segment.take_room(&(spare.done..end)) {
            Ok(()) => spare.done = end,
            Err(error) => {
                tracing::info!(%error, "no room for a spare segment");
                state.making = None;
            }
        }
        !state.stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::eventually;

    fn spares(folder: &Path) -> Spares {
        let spares = Spares::open(folder.join("spares"), false).unwrap();
        spares.fit(64 << 20);
        spares
    }

    fn files(folder: &Path) -> usize {
        fs::read_dir(folder.join("spares")).unwrap().count()
    }

    #[test]
    fn what_went_is_made_anew_and_given_to_who_needs_that_size() {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let spares = spares(scratch.path());
        spares.want(9 << 20);
        spares.want(1 << 20);
        eventually("both are made", || spares.is_idle() && spares.bytes() == 10 << 20);
        assert!(spares.take(2 << 20).is_none());
        let spare = spares.take(9 << 20).unwrap();
        assert_eq!(spare.ready_bytes(), 9 << 20);
        let place = scratch.path().join("segment");
        let segment = spare.place(&place).unwrap();
        assert_eq!((segment.taken_bytes(), place.exists(), files(scratch.path())), (9 << 20, true, 1));
        drop(spares.take(1 << 20));
        assert_eq!((spares.bytes(), files(scratch.path())), (0, 0), "one that is not used leaves no file");
    }

    #[test]
    fn they_give_way_to_what_the_budget_needs() {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let spares = spares(scratch.path());
        for _ in 0..3 {
            spares.want(8 << 20);
        }
        eventually("all are made", || spares.is_idle() && spares.bytes() == 24 << 20);
        spares.fit(17 << 20);
        assert_eq!((spares.bytes(), files(scratch.path())), (16 << 20, 2));
        spares.want(32 << 20);
        eventually("what does not fit is not made", || spares.is_idle());
        assert_eq!(spares.bytes(), 16 << 20);
        spares.fit(0);
        assert_eq!((spares.bytes(), files(scratch.path())), (0, 0));
    }

    #[test]
    fn nothing_is_left_of_a_run_or_of_one_that_was_killed() {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let folder = scratch.path().join("spares");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("000001"), b"left").unwrap();
        let spares = spares(scratch.path());
        assert_eq!(files(scratch.path()), 0);
        spares.want(32 << 20);
        drop(spares);
        assert!(!folder.exists());
    }
}

//! What the system says about the file system under the memory folder, and the huge-page tmpfs that a node mounts
//! there where it may (see ARCHITECTURE.md, One layout, two tiers).

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};

use crate::folder::{OnPath, PathError};

const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The mount that a path lies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountInfo {
    pub mount_point: PathBuf,
    pub options: String,
}

impl MountInfo {
    /// Whether it makes huge pages for mappings that ask for them.
    pub(crate) fn has_huge_pages(&self) -> bool {
        self.options.split(',').any(|option| matches!(option, "huge=advise" | "huge=always" | "huge=within_size"))
    }
}

/// Whether a path lies on a tmpfs.
pub(crate) fn is_tmpfs(path: &Path) -> Result<bool, PathError> {
    let stat = rustix::fs::statfs(path).on("ask for the file system of", path)?;
    Ok(stat.f_type as u64 == TMPFS_MAGIC)
}

/// The mount under an existing path.
pub(crate) fn mount_of(path: &Path) -> Result<Option<MountInfo>, PathError> {
    let path = path.canonicalize().on("resolve", path)?;
    let table = Path::new("/proc/self/mountinfo");
    let text = fs::read_to_string(table).on("read", table)?;
    Ok(find_mount(&text, &path))
}

fn find_mount(table: &str, path: &Path) -> Option<MountInfo> {
    let mounts = table.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mount_point = unescape(before.split(' ').nth(4)?);
        let options = after.split(' ').nth(2)?.to_owned();
        path.starts_with(&mount_point).then_some(MountInfo { mount_point, options })
    });
    // The deepest mount point wins, and of two on the same one the later, which hides the earlier.
    mounts.max_by_key(|mount| mount.mount_point.components().count())
}

/// Spaces and the like stand in the table as `\` and three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let code = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(code) if byte == b'\\' => {
                bytes.push(code);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

/// Mounts a tmpfs of `size_bytes` with huge pages for those who ask, over an empty folder.
pub(crate) fn mount_huge(path: &Path, size_bytes: u64) -> io::Result<()> {
    let options = mount_options(size_bytes)?;
    Ok(rustix::mount::mount("ballast", path, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())?)
}

/// Changes the size of a tmpfs that is mounted at `path`.
pub(crate) fn resize(path: &Path, size_bytes: u64) -> io::Result<()> {
    let options = mount_options(size_bytes)?;
    Ok(rustix::mount::mount_remount(path, MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())?)
}

fn mount_options(size_bytes: u64) -> io::Result<CString> {
    // Digits and letters only: no NUL can be in it.
    CString::new(format!("size={size_bytes},huge=advise,mode=0700")).map_err(io::Error::other)
}

/// Takes a mount away again; refused while a file on it is open.
pub(crate) fn unmount(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::empty())?)
}

/// Bytes of memory that the machine has; `None` when the system does not say.
pub(crate) fn machine_memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 8:1 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=65536k
41 30 0:40 / /dev/shm/ballast\\040one rw - tmpfs ballast rw,size=1g,huge=advise
";

    #[test]
    fn the_deepest_mount_point_wins() {
        let plain = find_mount(TABLE, Path::new("/dev/shm/other")).unwrap();
        assert_eq!(plain.mount_point, Path::new("/dev/shm"));
        assert!(!plain.has_huge_pages());
        let huge = find_mount(TABLE, Path::new("/dev/shm/ballast one/instances")).unwrap();
        assert!(huge.has_huge_pages());
        assert_eq!(find_mount(TABLE, Path::new("/home")).unwrap().mount_point, Path::new("/"));
    }

    #[test]
    fn the_machine_says_how_much_memory_it_has() {
        assert!(machine_memory_bytes().unwrap() > 1 << 20);
        assert!(is_tmpfs(Path::new("/dev/shm")).unwrap());
        assert!(!is_tmpfs(Path::new("/proc")).unwrap());
    }
}

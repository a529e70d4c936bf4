//! What the system is asked in C: libraries, another process's memory, addresses of interfaces.
#![expect(
    unsafe_code,
    reason = "dlopen, process_vm_readv and getifaddrs have no safe wrappers among this crate's dependencies"
)]

use std::ffi::{CStr, CString};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Opens a shared library and keeps it open.
///
/// Its constructors run, which may take the process down: ask in a process of its own.
pub(crate) fn open_library(name: &str) -> Result<(), String> {
    let name = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: a string that ends with 0; constructors of the library are what is tried, in a process of its own.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: the call has no arguments; it reads what the failed `dlopen` of this thread left.
    let why = unsafe { libc::dlerror() };
    if why.is_null() {
        return Err("the loader does not say why".to_owned());
    }
    // SAFETY: not null, so it is a string that ends with 0 and lives until this thread's next call of the loader.
    Err(unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned())
}

/// Reads bytes of another process, by the call that UCX's `cma` makes.
pub(crate) fn read_process(pid: i32, address: usize, bytes: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: bytes.len() };
    // SAFETY: `local` is one writable buffer that outlives the call; the kernel checks the other process's range.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    match usize::try_from(read) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(read) if read < bytes.len() => Err(io::Error::other(format!("{read} of {} bytes", bytes.len()))),
        Ok(_) => Ok(()),
    }
}

/// The names of interfaces with their IP addresses.
pub(crate) fn addresses() -> io::Result<Vec<(String, IpAddr)>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call writes one pointer.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut found, mut next) = (Vec::new(), first);
    while !next.is_null() {
        // SAFETY: not null, so it is an entry of the list, which lives until `freeifaddrs`.
        let entry = unsafe { &*next };
        // SAFETY: a name of the list, which ends with 0.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        if let Some(ip) = ip_of(entry.ifa_addr) {
            found.push((name, ip));
        }
        next = entry.ifa_next;
    }
    // SAFETY: the list that `getifaddrs` made, freed once; nothing of it is kept.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// The IP in an address of `getifaddrs`, which is null, or as long as its family says.
fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, so at least a family is there.
    let family = i32::from(unsafe { (*address).sa_family });
    match family {
        libc::AF_INET => {
            // SAFETY: this family's addresses are `sockaddr_in`; read unaligned, since only `sockaddr` is promised.
            let found: libc::sockaddr_in = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(found.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: this family's addresses are `sockaddr_in6`; read unaligned, as above.
            let found: libc::sockaddr_in6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(found.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let why = open_library("libkvferry-nowhere.so.7").unwrap_err();
        assert!(why.contains("libkvferry-nowhere.so.7"), "{why}");
        assert_eq!(open_library("libc.so.6"), Ok(()));
    }

    #[test]
    fn a_process_reads_its_own_memory() {
        let known = *b"kvferry reads it";
        let mut found = [0; 16];
        read_process(std::process::id() as i32, known.as_ptr() as usize, &mut found).unwrap();
        assert_eq!(found, known);
        assert!(read_process(std::process::id() as i32, 8, &mut found).is_err());
    }

    #[test]
    fn the_loopback_interface_has_its_address() {
        let found = addresses().unwrap();
        assert!(found.iter().any(|(_, ip)| ip.is_loopback()), "{found:?}");
    }
}

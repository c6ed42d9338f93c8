// Package filelock keeps locks in files, for all processes of one host. It needs no server.
//
// # Guarantees
//
// Processes that name the same directory exclude each other while their terms last. They may belong
// to any user who may write in the directory, and run in any container that shares the directory
// and this host's kernel. On Linux and macOS a term is counted by the kernel's boot clock, which
// all these processes share. The boot clock counts through a suspend and cannot be set. On other
// systems, and between containers that have boot identifiers of their own, as LXC containers have,
// terms are counted by the wall clock. If that clock is set forward by a term, a lease ends early.
// After a reboot, the terms of earlier records end by the wall clock. Fences grow across reboots,
// even if the clock is set back. After a power failure, which may undo the last half minute of
// changes, fences grow if the clock is right.
//
// If the host sleeps for longer than the rest of a term, the lease ends, although no process of the
// host can have asked for the key. The Client ends its leases by a clock that counts through a
// suspend, because with most stores another host may have taken the key meanwhile.
//
// A process that dies at any instruction leaves a state that the next process can read. If it dies
// while it renews a record, the record keeps the earlier term.
//
// A full disk ends no lease, because only taking a key needs space. Renewals overwrite the record,
// and Unlock, Break, Inspect, List and Open work as well. This does not hold on file systems that
// write each change to a new place, such as btrfs and ZFS.
//
// The error names the file if the disk is full, if the directory cannot be read, or if a state file
// is damaged or foreign. None of these errors admits a second holder. A state file that cannot be
// read blocks its key until the file is removed, by Break or by hand. A foreign file with the name
// of a stripe stays unchanged, and the keys of the stripe get no fence until that file is removed
// by hand.
//
// # Limits
//
// Only processes of one host exclude each other, even if several hosts or virtual machines share
// the directory, as with NFS or SMB. The file system must support flock(2). A hostile process that
// may write in the directory can break locks. So use a directory that belongs to the users who
// share the locks, and not /tmp itself. Waiters have no order: the first caller that asks for the
// free key receives it.
//
// A process that is stopped while it takes, renews or releases a key may block a 64th of all keys
// until it continues or ends. SIGSTOP, a debugger and "docker pause" stop processes. The critical
// part of such a call lasts for tens of microseconds, and does not include the creation of the
// record's file. The error of other processes names the guard's file. A process that is stopped at
// any other time blocks only the keys that it holds, until their terms end.
//
// # Cost
//
// On Unix, an attempt at a held key reads one file and locks no file, which takes about 10 µs.
// Polling by many callers is therefore cheap. To take a key takes about twenty system calls, one of
// which creates a file. A renewal or a release takes about fifteen, and creates no file. On a local
// file system these calls take tens of microseconds. A list reads 256 names at a time, and the
// record of each name. On Unix, a list locks no guard. A claim with a fence writes a second file.
// No call waits for the disk. A power failure may lose records, but it also ends their holders. If
// a power failure leaves an incomplete record, the record's key is free after the next boot.
//
// # URL
//
// filelock:///var/lib/app/locks names a directory by its absolute path, and filelock://./locks or
// filelock://../locks by a path relative to the working directory. Nothing is percent-decoded.
// filelock:// alone names $XDG_STATE_HOME/hasp or ~/.local/state/hasp of this user.
//
//	mode   permissions of the directory if it has to be created, in octal (default 0700)
//
// # Files
//
// The directory is created if it is missing. The files in it have the directory's permissions
// without the right to execute. A user who may write may lock. A user who may only read may inspect
// with a Client from [New]. Such a user cannot open the directory by URL, because Open locks a
// guard. For several users, create the directory with mode=0770 and the group
// that they share; hasp sets the setgid bit. Missing parents get mode 0700. A sticky directory
// serves only one user, because other users cannot replace an expired record. If the directory is
// removed, its keys are free, as after Break.
//
//	key-NAME.lock          the record of a held key, twice, as text; NAME is the key
//	sha256-HEX.lock        with %xx escapes; a long key has its SHA-256 instead
//	guard-00 … guard-3f    locked while the records of one stripe of the keys are
//	                       changed; never remove a guard that may be in use
//	stripe-00 … stripe-3f  the last fence of the keys of the stripe
//	temp-*                 a file that does not have its name yet
//
// A key that was released or broken has no file, so a million keys that are not in use leave 128
// small files. The record of a holder that died or had a minimum hold expires. An expired record
// stays until the key is taken again or a sweep removes the record. A driver sweeps 256 files when
// it takes its first key, and each 128th key after that. Therefore expired records outnumber other
// records by a few hundred at most. Open by URL sweeps 1,000 files. A process that dies while it
// takes a key may leave a file temp-*, which a sweep removes after an hour. A process that dies
// while it creates the directory may leave .filelock-new-* beside it. hasp does not remove that.
package filelock

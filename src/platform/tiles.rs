//! A processor's tiles (AMX) for tests, on processors that have none: such an instruction is an illegal one there, the system
//! says so by a signal, and what handles it does what the instruction would have done. The code under test is what others run.
//!
//! Each takes microseconds. What an instruction does is written down in Intel's manual (volume 2).

use std::{cell::UnsafeCell, sync::Once};

const TILES: usize = 8;
const ROWS: usize = 16;
const LINE: usize = 64;

/// What a thread has in its tiles.
struct State {
    /// Instructions so far.
    steps: u64,
    /// Rows, and bytes in a row; none before `ldtilecfg`.
    rows: [usize; TILES],
    bytes: [usize; TILES],
    tiles: [[[u8; LINE]; ROWS]; TILES],
}

thread_local! {
    static STATE: UnsafeCell<State> = const {
        UnsafeCell::new(State { steps: 0, rows: [0; TILES], bytes: [0; TILES], tiles: [[[0; LINE]; ROWS]; TILES] })
    };
}

/// From now on tiles' instructions do what they should, in all threads. Returns how many they were so far in this one.
pub fn emulate() -> u64 {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: all zeros are an action; the handler has the type that SA_SIGINFO asks for.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = illegal as extern "C" fn(_, _, _) as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()), 0);
        }
    });
    // SAFETY: nobody else has it while this thread is here.
    STATE.with(|state| unsafe { (*state.get()).steps })
}

extern "C" fn illegal(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system hands over the context of the thread that was interrupted, at an instruction, so not inside of
    // another handling: its registers are ours to change, its code and what that names can be read.
    let done = unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        STATE.with(|state| step(&mut *state.get(), registers))
    };
    if done.is_none() {
        // Some other illegal instruction: nothing can go on.
        std::process::abort();
    }
}

/// Bytes of code, one after the other.
struct Code(*const u8);

impl Code {
    /// # Safety
    /// The code goes on.
    unsafe fn byte(&mut self) -> u8 {
        // SAFETY: passed on.
        unsafe {
            let byte = self.0.read();
            self.0 = self.0.add(1);
            byte
        }
    }
}

/// Does one instruction, and goes on behind it; `None` if it is not one of tiles.
///
/// # Safety
/// The registers are those of a thread at an instruction, and its operands in memory are what that asks for.
unsafe fn step(state: &mut State, registers: &mut [i64; 23]) -> Option<()> {
    let mut code = Code(registers[libc::REG_RIP as usize] as *const u8);
    // SAFETY: an instruction of this prefix has at least five bytes, of which the fifth tells how many more.
    unsafe {
        if code.byte() != 0xc4 {
            return None;
        }
        let (first, second, opcode, modes) = (code.byte(), code.byte(), code.byte(), code.byte());
        if first & 0x1f != 2 || second & 0x84 != 0 {
            return None;
        }
        let third = usize::from(!second >> 3 & 15);
        let (tile, other) = (usize::from(modes >> 3 & 7), usize::from(modes & 7));
        let memory = modes >> 6 != 3;
        let mut at = (std::ptr::null_mut(), 0);
        if memory {
            at = address(&mut code, modes, first, registers)?;
        }
        match (opcode, second & 3, memory) {
            (0x49, 0, true) => state.configure(std::slice::from_raw_parts(at.0, LINE)),
            (0x49, 0, false) => state.configure(&[0; LINE]),
            (0x49, 3, false) => state.tiles[tile] = [[0; LINE]; ROWS],
            (0x4b, 1 | 3, true) => {
                state.tiles[tile] = [[0; LINE]; ROWS];
                for row in 0..state.rows[tile] {
                    let from = at.0.wrapping_offset(at.1 * row as isize);
                    let to = state.tiles[tile][row].as_mut_ptr();
                    to.copy_from_nonoverlapping(from, state.bytes[tile]);
                }
            }
            (0x4b, 2, true) => {
                for row in 0..state.rows[tile] {
                    let to = at.0.wrapping_offset(at.1 * row as isize);
                    to.copy_from_nonoverlapping(state.tiles[tile][row].as_ptr(), state.bytes[tile]);
                }
            }
            (0x5e, signs, false) => state.multiply(tile, other, third, [signs >= 2, signs & 1 == 1])?,
            _ => return None,
        }
    }
    registers[libc::REG_RIP as usize] = code.0 as i64;
    state.steps += 1;
    Some(())
}

/// The address of an operand in memory without its index, and the index: rows are that far apart.
///
/// # Safety
/// As for [`step`].
unsafe fn address(code: &mut Code, modes: u8, prefix: u8, registers: &[i64; 23]) -> Option<(*mut u8, isize)> {
    use libc::*;
    const ORDER: [i32; 16] = [
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10, REG_R11,
        REG_R12, REG_R13, REG_R14, REG_R15,
    ];
    let register = |low: u8, high: bool| registers[ORDER[usize::from(low & 7) + 8 * usize::from(high)] as usize];
    let mode = modes >> 6;
    let (mut base, mut index) = (modes, 0);
    if modes & 7 == 4 {
        // SAFETY: such a byte of modes has another one behind it.
        base = unsafe { code.byte() };
        let none = base >> 3 & 7 == 4 && prefix & 0x40 != 0;
        index = if none { 0 } else { register(base >> 3, prefix & 0x40 == 0) << (base >> 6) };
    }
    if mode == 0 && base & 7 == 5 {
        return None;
    }
    let mut at = register(base, prefix & 0x20 == 0);
    let bytes = [0, 1, 4][usize::from(mode)];
    let mut offset = 0i32;
    for byte in 0..bytes {
        // SAFETY: as many bytes as the mode says.
        offset |= i32::from(unsafe { code.byte() }) << (8 * byte);
    }
    at += i64::from(if bytes == 1 { i32::from(offset as i8) } else { offset });
    Some((at as *mut u8, index as isize))
}

impl State {
    /// `ldtilecfg`; of zeros `tilerelease`.
    fn configure(&mut self, shapes: &[u8]) {
        for tile in 0..TILES {
            self.bytes[tile] = usize::from(u16::from_le_bytes([shapes[16 + 2 * tile], shapes[17 + 2 * tile]]));
            self.rows[tile] = usize::from(shapes[48 + tile]);
        }
        self.tiles = [[[0; LINE]; ROWS]; TILES];
    }

    /// `to[m][n] += a[m][4 k + i] * b[k][4 n + i]` over `k` and `i`; each of the two has signs or not.
    fn multiply(&mut self, to: usize, a: usize, b: usize, signs: [bool; 2]) -> Option<()> {
        let (rows, columns, depth) = (self.rows[to], self.bytes[to] / 4, self.bytes[a] / 4);
        // Other shapes are a fault.
        if self.rows[a] != rows || self.rows[b] != depth || self.bytes[b] != 4 * columns || rows * columns * depth == 0
        {
            return None;
        }
        let value = |byte: u8, signed: bool| if signed { i32::from(byte as i8) } else { i32::from(byte) };
        for m in 0..rows {
            for n in 0..columns {
                let mut sum = 0i32;
                for k in 0..depth {
                    for i in 0..4 {
                        let (a, b) = (self.tiles[a][m][4 * k + i], self.tiles[b][k][4 * n + i]);
                        sum = sum.wrapping_add(value(a, signs[0]) * value(b, signs[1]));
                    }
                }
                let (words, _) = self.tiles[to][m].as_chunks_mut::<4>();
                words[n] = i32::from_le_bytes(words[n]).wrapping_add(sum).to_le_bytes();
            }
        }
        Some(())
    }
}

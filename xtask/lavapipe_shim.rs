//! `libvk_swiftshader.so` for a Chromium under test: hands everything on to Mesa's lavapipe, and lets its device pass for
//! SwiftShader's, the only software device that Chromium offers to WebGPU.
//!
//! Built by `xtask/src/lavapipe.rs` with `rustc` alone; `OUTRIDER_LAVAPIPE` names the driver then.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

/// A Vulkan function of whatever signature.
type Function = Option<unsafe extern "C" fn()>;
type GetProcAddr = unsafe extern "C" fn(*mut c_void, *const c_char) -> Function;
type Negotiate = unsafe extern "C" fn(*mut u32) -> c_int;
type GetProperties = unsafe extern "C" fn(*mut c_void, *mut c_void);

const DRIVER: &str = concat!(env!("OUTRIDER_LAVAPIPE"), "\0");

/// SwiftShader's vendor and device.
const IDENTITY: [u32; 2] = [0x1AE0, 0xC0DE];
/// Words before these two in `VkPhysicalDeviceProperties`: the versions of the API and the driver.
const IDENTITY_AT: usize = 2;
/// Words before that structure in `VkPhysicalDeviceProperties2`: its type, padding and a pointer.
const PROPERTIES_AT: usize = 4;

const INCOMPATIBLE_DRIVER: c_int = -9;

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

struct Driver {
    instance: GetProcAddr,
    physical_device: GetProcAddr,
    negotiate: Negotiate,
}

fn driver() -> Option<&'static Driver> {
    const NOW: c_int = 2;
    static DRIVER_ONCE: OnceLock<Option<Driver>> = OnceLock::new();
    let open = || unsafe {
        let library = dlopen(DRIVER.as_ptr().cast(), NOW);
        if library.is_null() {
            eprintln!("lavapipe_shim: {DRIVER} could not be opened");
            return None;
        }
        let symbol = |name: &CStr| Some(dlsym(library, name.as_ptr())).filter(|found| !found.is_null());
        Some(Driver {
            instance: transmute::<*mut c_void, GetProcAddr>(symbol(c"vk_icdGetInstanceProcAddr")?),
            physical_device: transmute::<*mut c_void, GetProcAddr>(symbol(c"vk_icdGetPhysicalDeviceProcAddr")?),
            negotiate: transmute::<*mut c_void, Negotiate>(symbol(c"vk_icdNegotiateLoaderICDInterfaceVersion")?),
        })
    };
    DRIVER_ONCE.get_or_init(open).as_ref()
}

static PROPERTIES: OnceLock<GetProperties> = OnceLock::new();
static PROPERTIES_2: OnceLock<GetProperties> = OnceLock::new();

unsafe extern "C" fn properties(device: *mut c_void, out: *mut c_void) {
    if let Some(get) = PROPERTIES.get() {
        unsafe {
            get(device, out);
            out.cast::<u32>().add(IDENTITY_AT).cast::<[u32; 2]>().write(IDENTITY);
        }
    }
}

unsafe extern "C" fn properties_2(device: *mut c_void, out: *mut c_void) {
    if let Some(get) = PROPERTIES_2.get() {
        unsafe {
            get(device, out);
            out.cast::<u32>().add(PROPERTIES_AT + IDENTITY_AT).cast::<[u32; 2]>().write(IDENTITY);
        }
    }
}

/// # Safety
/// As Vulkan's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkGetInstanceProcAddr(instance: *mut c_void, name: *const c_char) -> Function {
    let found = unsafe { (driver()?.instance)(instance, name) }?;
    let ours = |get: GetProperties| Some(unsafe { transmute::<GetProperties, unsafe extern "C" fn()>(get) });
    let theirs = || unsafe { transmute::<unsafe extern "C" fn(), GetProperties>(found) };
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"vkGetInstanceProcAddr" => {
            Some(unsafe { transmute::<GetProcAddr, unsafe extern "C" fn()>(vkGetInstanceProcAddr) })
        }
        b"vkGetPhysicalDeviceProperties" => {
            PROPERTIES.get_or_init(theirs);
            ours(properties)
        }
        b"vkGetPhysicalDeviceProperties2" | b"vkGetPhysicalDeviceProperties2KHR" => {
            PROPERTIES_2.get_or_init(theirs);
            ours(properties_2)
        }
        _ => Some(found),
    }
}

/// # Safety
/// As the Vulkan loader's interface to drivers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vk_icdGetInstanceProcAddr(instance: *mut c_void, name: *const c_char) -> Function {
    unsafe { vkGetInstanceProcAddr(instance, name) }
}

/// # Safety
/// As the Vulkan loader's interface to drivers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vk_icdGetPhysicalDeviceProcAddr(instance: *mut c_void, name: *const c_char) -> Function {
    unsafe { (driver()?.physical_device)(instance, name) }
}

/// # Safety
/// As the Vulkan loader's interface to drivers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vk_icdNegotiateLoaderICDInterfaceVersion(version: *mut u32) -> c_int {
    driver().map_or(INCOMPATIBLE_DRIVER, |driver| unsafe { (driver.negotiate)(version) })
}

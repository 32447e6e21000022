/* Preloaded by tools/vulkan.sh: vkDestroyBuffer does nothing.
 *
 * Mesa before 23.1 binds every descriptor of a set, those that the shader does not read too, and takes references to the
 * buffers in them. ggml's sets have twelve descriptors of which an operation writes the first few, so the others may name
 * a buffer that is gone, which is allowed; there the process ends. A kept buffer costs a few hundred bytes: its memory
 * is freed by vkFreeMemory. */
#include <dlfcn.h>
#include <string.h>
#include <vulkan/vulkan_core.h>

static PFN_vkGetDeviceProcAddr device_proc;

static void keep_buffer(VkDevice device, VkBuffer buffer, const VkAllocationCallbacks * allocator) {
    (void) device, (void) buffer, (void) allocator;
}

static PFN_vkVoidFunction our_device_proc(VkDevice device, const char * name) {
    return strcmp(name, "vkDestroyBuffer") == 0 ? (PFN_vkVoidFunction) keep_buffer : device_proc(device, name);
}

/* What libslowar finds in the place of the loader's. */
PFN_vkVoidFunction vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    void * const                    loader = dlopen("libvulkan.so.1", RTLD_NOW);
    const PFN_vkGetInstanceProcAddr next   = (PFN_vkGetInstanceProcAddr) dlsym(loader, "vkGetInstanceProcAddr");
    const PFN_vkVoidFunction        found  = next(instance, name);
    if (strcmp(name, "vkDestroyBuffer") == 0) {
        return (PFN_vkVoidFunction) keep_buffer;
    }
    if (found && strcmp(name, "vkGetDeviceProcAddr") == 0) {
        device_proc = (PFN_vkGetDeviceProcAddr) found;
        return (PFN_vkVoidFunction) our_device_proc;
    }
    return found;
}

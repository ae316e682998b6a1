// ptx/launch.cuh: programmatic dependent launch: a kernel of a stream begins while the one before it ends. PTX ISA, "Parallel
// Synchronization and Communication Instructions: griddepcontrol". sm_90.
#pragma once

namespace flash::ptx {

// griddepcontrol.wait: until the kernel before has ended and its memory is visible. At once where the launch is an ordinary one.
__device__ __forceinline__ void wait_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents: the kernel behind may begin once every block has said so or ended.
__device__ __forceinline__ void launch_kernel_behind() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace flash::ptx

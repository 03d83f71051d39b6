/* What torch and Triton call of CUDA's runtime and driver, where there is no GPU. Device memory is the host's, in which
   copies are carried out; kernels do nothing; a graph is a number. What happens is told to `callback`, which
   tests/attacks/emulate.py sets, and which computes. Built once as a library that goes before libcudart, and as libcuda. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#undef cudaStreamGetCaptureInfo
#undef cudaGetDeviceProperties
#define OK return cudaSuccess
typedef cudaError_t E;

/* ------------------------------------------------------------------------------------------ what is told */

enum { COPY, SET, BEGIN, REPLAY, KERNEL };
static void (*callback)(int what, void *a, void *b, size_t n);
void emulate_callback(void (*f)(int, void *, void *, size_t)) { callback = f; }
static void tell(int what, void *a, void *b, size_t n) { if (callback) callback(what, a, b, n); }

static long captures, capturing; /* the graph that is being recorded, from 1 on; 0: none */
static cudaStream_t captured;
long emulate_capturing(void) { return capturing; }
static int records(cudaStream_t s) { return capturing && s == captured; }

/* ------------------------------------------------------------------------------------------------ memory */

typedef struct { char *begin; size_t n; int on_device; } Range;
static Range ranges[1 << 16];
static int n_ranges;

static E take(void **p, size_t n, int on_device) {
    if (n_ranges == 1 << 16 || posix_memalign(p, 2 << 20, (n + 511) / 512 * 512)) return cudaErrorMemoryAllocation;
    memset(*p, 0, n < (64 << 20) ? n : 0);
    ranges[n_ranges++] = (Range){*p, n, on_device};
    OK;
}
static E give(void *p) {
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].begin == p) { free(p); ranges[i] = ranges[--n_ranges]; break; }
    OK;
}
E cudaMalloc(void **p, size_t n) { return take(p, n, 1); }
E cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return take(p, n, 1); }
E cudaHostAlloc(void **p, size_t n, unsigned flags) { return take(p, n, 0); }
E cudaFree(void *p) { return give(p); }
E cudaFreeAsync(void *p, cudaStream_t s) { return give(p); }
E cudaFreeHost(void *p) { return give(p); }
E cudaHostRegister(void *p, size_t n, unsigned flags) { OK; }
E cudaHostUnregister(void *p) { OK; }
E cudaMemGetInfo(size_t *rest, size_t *all) { *all = 150ul << 30; *rest = 140ul << 30; OK; }
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    for (int i = 0; i < n_ranges; i++)
        if ((char *)p >= ranges[i].begin && (char *)p < ranges[i].begin + ranges[i].n) {
            a->type = ranges[i].on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
            a->devicePointer = a->hostPointer = (void *)p;
        }
    OK;
}
static E copy(void *to, const void *from, size_t n, cudaStream_t s) {
    if (records(s)) tell(COPY, to, (void *)from, n); else memmove(to, from, n);
    OK;
}
E cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) { memmove(to, from, n); OK; }
E cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
    return copy(to, from, n, s);
}
E cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) { return copy(to, from, n, s); }
E cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                    enum cudaMemcpyKind k, cudaStream_t s) {
    for (size_t i = 0; i < height; i++) copy((char *)to + i * to_pitch, (char *)from + i * from_pitch, width, s);
    OK;
}
E cudaMemcpyToSymbol(const void *to, const void *from, size_t n, size_t offset, enum cudaMemcpyKind k) { OK; }
E cudaMemset(void *to, int value, size_t n) { memset(to, value, n); OK; }
E cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t s) {
    if (records(s)) tell(SET, to, (void *)(long)value, n); else memset(to, value, n);
    OK;
}
E cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) { *p = (void *)8; OK; }
E cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { *(long *)v = 0; OK; }
E cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc *d, size_t n) { OK; }
E cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { OK; }
E cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { OK; }

/* -------------------------------------------------------------------------------------- one Hopper device */

E cudaGetDeviceCount(int *n) { *n = 1; OK; }
E cudaGetDevice(int *d) { *d = 0; OK; }
E cudaSetDevice(int d) { return d ? cudaErrorInvalidDevice : cudaSuccess; }
E cudaDeviceSynchronize(void) { OK; }
E cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; OK; }
E cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; OK; }
E cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; OK; }
E cudaDeviceEnablePeerAccess(int a, unsigned flags) { OK; }
E cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:00:00.0"); OK; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; OK; }
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "a GPU that is not there");
    p->major = 9; p->multiProcessorCount = 132; p->totalGlobalMem = 150ul << 30; p->warpSize = 32;
    p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->maxBlocksPerMultiProcessor = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->l2CacheSize = 60 << 20; p->memoryBusWidth = 6144;
    p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->unifiedAddressing = p->concurrentKernels = 1; p->textureAlignment = 512;
    OK;
}
/* Of the runtime and of the driver, which number them alike. */
static int attribute(int a) {
    switch (a) {
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrMaxGridDimX: return 2147483647;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
        case cudaDevAttrMaxRegistersPerBlock: return 65536;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMultiProcessorCount: return 132;
        case cudaDevAttrComputeCapabilityMajor: return 9;
        case 13: return 1980000;  /* clock rate, which newer headers lack */
        case 36: return 3201000;  /* of memory */
        case cudaDevAttrGlobalMemoryBusWidth: return 6144;
        default: return 0;
    }
}
E cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attribute(a); OK; }
static int nothing(void) { return 0; }
E cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *status) {
    *f = (void *)nothing;
    if (status) *status = cudaDriverEntryPointSuccess;
    OK;
}
const char *cudaGetErrorName(E e) { return "cudaError"; }
const char *cudaGetErrorString(E e) { return "an error of a GPU that is not there"; }
E cudaGetLastError(void) { OK; }
E cudaPeekAtLastError(void) { OK; }
E cudaProfilerStart(void) { OK; }
E cudaProfilerStop(void) { OK; }

/* ------------------------------------------------------------------------------------- events and streams */

static double milliseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = calloc(1, sizeof(double)); OK; }
E cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
E cudaEventDestroy(cudaEvent_t e) { free(e); OK; }
E cudaEventRecord(cudaEvent_t e, cudaStream_t s) { *(double *)e = milliseconds(); OK; }
E cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
E cudaEventQuery(cudaEvent_t e) { OK; }
E cudaEventSynchronize(cudaEvent_t e) { OK; }
E cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = *(double *)b - *(double *)a; OK; }
static long streams = 16;
E cudaStreamCreate(cudaStream_t *s) { *s = (void *)(streams += 16); OK; }
E cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { return cudaStreamCreate(s); }
E cudaStreamDestroy(cudaStream_t s) { OK; }
E cudaStreamQuery(cudaStream_t s) { OK; }
E cudaStreamSynchronize(cudaStream_t s) { return records(s) ? cudaErrorStreamCaptureUnsupported : cudaSuccess; }
E cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { OK; }
E cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; OK; }
E cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *d, unsigned flags) { f(s, cudaSuccess, d); OK; }
E cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *d) { f(d); OK; }

/* ------------------------------------------------------------------------------------------------- graphs */

E cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    capturing = ++captures;
    captured = s;
    tell(BEGIN, (void *)capturing, 0, 0);
    OK;
}
E cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { *g = (void *)capturing; capturing = 0; OK; }
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = records(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    OK;
}
E cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *g,
                           const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
    if (id) *id = capturing;
    if (g) *g = (void *)capturing;
    if (n) *n = 0;
    return cudaStreamIsCapturing(s, status);
}
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { OK; }
E cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags) { *x = (void *)g; OK; }
E cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; OK; }
E cudaGraphNodeGetDependencies(cudaGraphNode_t x, cudaGraphNode_t *y, cudaGraphEdgeData *e, size_t *n) { *n = 0; OK; }
E cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) { tell(REPLAY, x, 0, 0); OK; }
E cudaGraphDestroy(cudaGraph_t g) { OK; }
E cudaGraphExecDestroy(cudaGraphExec_t g) { OK; }
E cudaGraphDebugDotPrint(cudaGraph_t g, const char *file, unsigned flags) { OK; }

/* --------------------------------------------------------------------- kernels of torch's own, by their names */

static struct { const void *function; const char *name; } kernels[1 << 17];
static int n_kernels;
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *f, char *g, const char *name, int l, void *a, void *b, void *c,
                            void *d, int *w) {
    if (n_kernels < 1 << 17) { kernels[n_kernels].function = f; kernels[n_kernels++].name = name; }
}
void __cudaRegisterVar(void **handle, char *v, char *a, const char *name, int e, size_t n, int c, int g) {}
char __cudaInitModule(void **handle) { return 0; }
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, void *s) { return 0; }
E __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *n, void *s) { OK; }
static E launched(const void *function) {
    const char *name = "?";
    for (int i = 0; i < n_kernels; i++)
        if (kernels[i].function == function) name = kernels[i].name;
    tell(KERNEL, (void *)name, 0, 0);
    OK;
}
E __cudaGetKernel(void **k, const void *f) { *k = (void *)f; OK; }
E __cudaLaunchKernel(void *k, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launched(k); }
E cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launched(f); }
E cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launched(f); }
E cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launched(f); }
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->binaryVersion = a->ptxVersion = 90;
    OK;
}
E cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { OK; }
E cudaGetSymbolAddress(void **p, const void *symbol) { *p = (void *)symbol; OK; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 8; OK; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) { *n = 8; OK; }

/* ------------------------------------------------------------------------------ the driver, as Triton needs it */

#define NOTHING(name) int name() { return 0; }
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxPushCurrent) NOTHING(cuCtxPopCurrent) NOTHING(cuCtxSetLimit)
NOTHING(cuModuleUnload) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuLaunchKernel)
NOTHING(cuLaunchKernelEx) NOTHING(cuLaunchCooperativeKernel) NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuTensorMapEncodeTiled) NOTHING(cuLinkCreate) NOTHING(cuLinkAddData) NOTHING(cuLinkComplete)
int cuDriverGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = attribute(a); return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)8; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int d) { *context = (void *)8; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetLimit(size_t *v, int limit) { *v = 1 << 20; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "an error of a GPU that is not there"; return 0; }
int cuModuleLoadData(void **module, const void *data) { *module = malloc(8); return 0; }
int cuModuleGetFunction(void **f, void *module, const char *name) { *f = strdup(name); return 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : 0; return 0; }
int cuPointerGetAttribute(void *v, int a, unsigned long p) { *(unsigned long *)v = p; return 0; }
